"""What the page about sizes says, as plain numbers first.

rows               a row of numbers for each seed, and the seeds of each size
pooled             a mean over seeds whose interval holds the doubt of seeds and of posts
collapse           the rule by which a seed is called out
verdicts           does PPO beat the references at a size
fits               straight lines over the logarithm of parameters, where points can carry one
beside_paper       reproduced, higher, lower or not comparable, number by number
over_optimisation  the proxy rose while the win rate or the gold score fell
curves             plots over parameters, and the frontier of score, win rate and KL
answers            the blocks of the first screen
details            the blocks below it
"""
