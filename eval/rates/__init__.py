"""What follows from verdicts.

formulas        means over posts, paired tests, agreement
length_control  the win rate at equal length
strengths       several systems and several judges
scores          mean scores of a proxy and a gold reward model
table           every rate of a table of verdicts, with its interval
"""
