"""What operators change and look at, for API, page and commands alike: one class of operations, and views of records."""
