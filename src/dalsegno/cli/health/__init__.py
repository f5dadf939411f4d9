"""Commands that check nodes, show their recovery and inject faults."""
