"""One file a page (`*_page`), and what they are made of.

run_page          one run
scaling_page      sizes side by side
ablations         one change at a time, over seeds
algorithms_page       PPO and its rivals at equal KL
calibration       a judge compared with labels
compare           policies of finished runs compared with the first of them
outputs_page      summaries that existed already
parts             what pages share: blocks, plots, words, tables
sections          parts of pages
scaling           the numbers and the parts of the page about sizes
sharing           cards, published pages
needs             what a run needs: the plan by counting, the rehearsal by running
speed             speed and memory beside other implementations
"""
