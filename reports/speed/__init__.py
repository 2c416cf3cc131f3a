"""Speed and memory of PPO's update beside other implementations.

texts       real posts, or tokens of the real lengths
meter       peak memory and time
measure     one measurement of ours
peer_trl    TRL's PPOTrainer on the same update
speed       ours and the peers, interleaved
figures     a bench as figures and ratios
bench_page  the page about it
"""
