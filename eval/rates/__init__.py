"""What follows from verdicts.

formulas        intervals, means over posts and seeds, paired tests, agreement, logistic models
reward_pairs    a reward model on held-out pairs: intervals, groups, beside the longer one
correction      the win rate behind a judge's known errors
length_control  the win rate at equal length
simple_judges   a judge beside the longest text, the majority label and the most overlap
agreement       Cohen's kappa of two judges, with its interval
table           every rate of a table of verdicts, with its interval
"""
