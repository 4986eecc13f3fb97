"""What runs in a Spark task and below it: task, forkserver, agent, ranks."""
