"""What every server of ours does about peers that it does not know yet."""
