"""One file a page (`*_page`), and what they share beside it.

run_page          one run
scaling_page      sizes side by side
ablations_page    one switch at a time
calibration_page  a judge beside labels
annotate_page     pairs for people to judge
judges_page       all judges beside the same labels
versus_page       two policies against each other
compare_page      policies of finished runs beside the first of them
bench_page        speed and memory, beside other implementations
outputs_page      summaries that existed already
leaderboard_page  all systems of a run, by all judges
sections          parts of pages
scaling           the numbers and the parts of the page about sizes
collect           a finished run as one row of numbers
made_from         the manifests behind a page
compared          an ablation beside the default run
comparison        what compare_page says, as figures
bench             a bench as figures and ratios
verdict           numbers in plain words
paper             the paper's numbers
opening           a run in four sentences
lineage           what a run was made from, as a picture
seeds             what a run's other seeds logged
run_report        the stage that writes a run's page
plots             plots as SVG
panels            plots of score against distance, and of spreads
blocks            what pages are made of
markdown          plain text as Markdown
numbers           tables as CSV and JSON
page_json         what a page says, as JSON
sample_rows       posts with all summaries and verdicts as rows
sample_browser    the block that searches them
token_view        the block that colours tokens of PPO
page              blocks, written as Markdown and HTML
publish           pages that are kept on purpose
push              models, cards and pages to the Hugging Face hub
readme_blocks     the README's two blocks of numbers
"""
