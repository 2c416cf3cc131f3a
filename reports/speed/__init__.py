"""Speed and memory of PPO's update beside other implementations.

update      one whole update of PPO
peers       other implementations: their environments, and the task that each is given
peer_trl    TRL's PPOTrainer on that task
speed       ours and the peers, interleaved
figures     a bench as figures and ratios
bench_page  the page about it
"""
