"""One file a page (`*_page`), and what they are made of.

run_page          one run
scaling_page      sizes side by side
ablations_page    one switch at a time
rivals_page       PPO and its rivals at equal KL
overoptimisation_page  gold score against KL, and the law of it
planted_page      known errors, planted in a run
calibration_page  a judge beside labels
annotate_page     pairs for people to judge
judges_page       all judges beside the same labels
versus_page       two policies against each other
compare_page      policies of finished runs beside the first of them
outputs_page      summaries that existed already
leaderboard_page  all systems of a run, by all judges
parts             what pages share: blocks, plots, words, tables
sections          parts of pages
scaling           the numbers and the parts of the page about sizes
sharing           cards, published pages, the hub
needs             what a run needs: the plan by counting, the rehearsal by running
speed             speed and memory beside other implementations
"""
