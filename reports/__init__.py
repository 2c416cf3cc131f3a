"""One file a page (`*_page`), and what they share beside it.

run_page          one run
scaling_page      sizes side by side
ablations_page    one switch at a time
calibration_page  a judge beside labels
annotate_page     pairs for people to judge
judges_page       all judges beside the same labels
versus_page       two policies
bench_page        speed and memory, beside other implementations
outputs_page      summaries that existed already
leaderboard_page  all systems of a run, by all judges
sections          parts of pages
scaling           the numbers and the parts of the page about sizes
collect           a finished run as one row of numbers
compared          an ablation beside the default run
bench             a bench as figures and ratios
verdict           numbers in plain words
paper             the paper's numbers
plots             plots as SVG
blocks            what pages are made of
markdown          plain text as Markdown
numbers           tables as CSV and JSON
page              blocks, written as Markdown and HTML
publish           pages that are kept on purpose
readme_blocks     the README's two blocks of numbers
"""
