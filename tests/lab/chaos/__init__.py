"""Real servers and real senders that are killed, stopped, cut off and filled up: what is lost?"""
