"""One file a page (`*_page`), and what they are made of.

run_page          one run
scaling           model sizes, compared with each other and with the paper
ablations_page    one switch at a time
algorithms_page       PPO and its rivals at equal KL
calibration_page  a judge beside labels
compare_page      policies of finished runs beside the first of them
outputs_page      summaries that existed already
parts             what pages share: blocks, plots, words, tables
sections          parts of pages
publish           copies finished pages to reports/generated
sharing           model cards, status
needs             what a run needs: the plan by counting, the rehearsal by running
speed             speed and memory beside other implementations
"""
