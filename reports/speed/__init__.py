"""Speed and memory of an update beside other implementations.

meter       peak memory and time
measure     one measurement of ours, in a process of its own
peer_trl    TRL's PPOTrainer on the same update
speed       ours and the peers, interleaved
bench_page  the page about it
"""
