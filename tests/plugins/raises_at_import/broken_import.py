raise RuntimeError("the moon is in the wrong phase")
