"""What runs in the user's process: takes code in, starts a gang, watches it, settles its outcome."""
