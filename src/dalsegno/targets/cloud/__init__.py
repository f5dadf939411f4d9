"""Code that all cloud targets share: prices, consequences, progress of long operations, credentials and the AWS API."""
