"""The GPU code of a training step, written, checked and run on a machine without a GPU.

Inductor writes the Triton kernels and library calls of a step for an H100 whose driver is a stand-in. `report` counts
kernels, bytes and peak memory, and predicts times by a written model, for the step and for the loop that people write
and compile. `assemble` compiles every kernel to machine code. `numbers` runs the code on the CPU, kernels in Triton's
interpreter, and compares it with the eager step; `faults` shows that it would find a wrong alias, order or draw.
`shipped` does all of this for everything that ships, in small steps (`trials`), and checks rules for their code
(`rules`): the proof that each compiles for a GPU, with the eager step's numbers. It takes hours, and runs in parts.

    bash benchmarks/gpu_code/run report mlp gpt resnet18 --methods plain sam
    bash benchmarks/gpu_code/run numbers mlp --methods plain mixup+label_smoothing ema sam
    bash benchmarks/gpu_code/run faults mlp --methods mixup+label_smoothing
    bash benchmarks/gpu_code/run assemble mlp
    bash benchmarks/gpu_code/run code mlp
    bash benchmarks/gpu_code/run shipped "method mixup*" "loss *" --record proofs.jsonl

None of them tells what needs a GPU: real bandwidth and launch times, and which kernels cuBLAS and cuDNN choose.
"""
