"""Real Horovod on Spark, behind the names of `horovod.spark` and `sparkdl`."""
