"""What is settled before any process starts: model and host are checked, engines and threads chosen, memory divided."""
