"""Do other synthetic inputs tell what a network's own images tell? Shapes tell it late.

`images` has the inputs that are tried, `runs` the runs of the study of alarms that are read on
them, `report` what came out (issue 39.2; the paper's Future Work asks for better ones).
"""
