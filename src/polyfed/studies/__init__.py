"""Studies: what many runs say together: searches for settings, and differences between methods.

space       what a search may try: ranges and choices, and how they are written
spaces      the spaces of every method as data; FedLinked's Table 4.3 as it is printed
validation  the federation that a search sees: validation data in the place of test data
search      one step of a search: trials asked, run in step, pruned, told
sweep       a whole search in a folder: architecture, then training; resumable
outcome     what a search came to: table, importance, files
page        the same as one HTML file
picture     parallel coordinates (FedLinked's Figures 4.2 and 4.3) and importance
paired      methods over seeds: exact tests, tables for papers
ranks       methods over tasks: mean ranks, critical difference
contests    which methods meet on which task, and with what in common
wins        contests held: the same budget for all, then the same tests
wins_page   "When does which method win?", with pictures
trackers    TensorBoard, MLflow, Weights & Biases
"""
