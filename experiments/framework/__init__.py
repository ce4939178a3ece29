"""The base of the experiments on all papers.

A paper (`paper`) is data: parts, each of which measures rows of figures and tables, and claims (`claims`), each with
the rule by which rows are judged. Its command, the table on the screen and the JSON file follow from that, and a
recorded run can be judged again. Parts measure with a study (`study`) of the paper's scale: in rank processes
(`ranks`, `rank`) they train by a method from a seed (`training`), and let methods take turns (`timing`). A method
attaches models to ranks: `methods` of sending gradients attach `replicas` under DDP, and papers' own methods shards or
stages. `results_page` lists the papers and has their tables, `everything` runs all of them.
"""
