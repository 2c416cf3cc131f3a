"""Speed and memory of an update beside other implementations.

texts             real posts, or tokens of the real lengths
meter             peak memory and time
place             what every measurement of ours needs
update            one whole update of ours
measure           one measurement of ours, in a process of its own
peer_trl          TRL's PPOTrainer on the same update
peer_trl_grouped  its RLOOTrainer and GRPOTrainer
speed             ours and the peers, interleaved
figures           a bench as figures and ratios
bench_page        the page about it
"""
