"""Speed and memory of an update beside other implementations.

texts       real posts, or tokens of the real lengths
meter       peak memory and time
measure     one measurement of ours
peer_trl    TRL's PPOTrainer on the same update
peer_trl_grouped   TRL's RLOOTrainer and GRPOTrainer
speed       ours and the peers, interleaved
figures     a bench as figures and ratios
bench_page  the page about it
"""
