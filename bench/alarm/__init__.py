"""How often is an alarm right? Error rates of what could warn that a network loses plasticity.

`losses` says what a loss is, `signals` what a measure is turned into, `rings` when an alarm rings,
`rates` how rings are judged, `choices` how thresholds are chosen and rules compared. The
definitions were fixed before the runs were made (issue 35 B).
"""
