"""What the paper compares with: cross-entropy finetuning and end-to-end training.

Ground-truth finetuning and the ablations are switches of the refinement itself (`refine.labels`, `refine.iterative`,
`refine.self_paced`, `refine.warmup_anchors`).
"""
