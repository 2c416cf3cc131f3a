"""What any policy-gradient stage shares.

episodes      one update's episodes as tensors
rollout       sample, measure, score
credit        shape the rewards, estimate advantages
loss          what the update descends
networks      policy, critic and their optimizer
start_checks  what must hold before the first update
"""
