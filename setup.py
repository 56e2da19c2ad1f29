from setuptools import find_packages, setup

# Stock fairseq cannot be imported on Python 3.11 and up; fairseq-fixed is its main branch of early 2025 with that
# repaired, under the same module name. scripts/setup.sh installs what its build needs first.
STOCK = 'python_version < "3.11"'
FIXED = 'python_version >= "3.11"'

setup(
    name="mixtape_plugin",
    version="0.1.0",
    description="A fairseq plugin with output layers that break the softmax bottleneck: MoS, MoC and Mixtape",
    packages=find_packages(include=["mixtape_plugin", "mixtape_plugin.*"]),
    python_requires=">=3.8",
    install_requires=[
        f"fairseq==0.12.2; {STOCK}",
        f"torch==1.12.1; {STOCK}",
        f"torchaudio==0.12.1; {STOCK}",
        f"numpy<1.24; {STOCK}",
        f"fairseq-fixed==0.12.3.1; {FIXED}",
        f"torch>=2.6; {FIXED}",
        f"numpy; {FIXED}",
        "matplotlib>=3.7",  # legends outside of the axes
        "sacrebleu",
        "sacremoses",
        "scipy",
        "sentencepiece",
        "subword-nmt",
        "tqdm",
    ],
    extras_require={
        "dev": [
            "hypothesis",
            "nltk",
            "pre-commit",
            "pytest",
            "pytest-xdist",
            "ruff==0.17.5",
            # torch with CUDA brings its own; without, Triton's interpreter runs the GPU kernels' tests
            f'triton>=3.3; sys_platform == "linux" and platform_machine == "x86_64" and {FIXED}',
        ]
    },
)
