"""The catalog is complete and plausible."""

import csv
from datetime import date
from pathlib import Path

import pytest

from dalsegno import hardware
from dalsegno.hardware import fabrics, gpus, instances
from dalsegno.hardware.catalog import cloud_prices, prices

TABLES = Path(hardware.__file__).parent

# The list with which the catalog was begun: type -> accelerator, count, NVLink GB/s, network Gb/s, cards, cpus, memory
# GiB. None means that the value was not known at that time.
REFERENCE = {
    "p4d.24xlarge": ("a100-40", 8, 300, 400, 4, 96, 1152),
    "p4de.24xlarge": ("a100-80", 8, 300, 400, 4, 96, 1152),
    "p5.4xlarge": ("h100", 1, 0, 100, 1, 16, 256),
    "p5.48xlarge": ("h100", 8, 450, 3200, 32, 192, 2048),
    "p5e.48xlarge": ("h200", 8, 450, 3200, 32, 192, 2048),
    "p5en.48xlarge": ("h200", 8, 450, 3200, 16, 192, 2048),
    "p6-b200.48xlarge": ("b200", 8, 900, 3200, 8, 192, 2048),
    "p6-b300.48xlarge": ("b300", 8, 900, 6400, 16, 192, 4096),
    "p6e-gb200.36xlarge": ("gb200", 4, 900, None, None, 144, 960),
    "g5.xlarge": ("a10g", 1, 0, 2.5, 0, 4, 16),
    "g5.12xlarge": ("a10g", 4, 0, 40, 1, 48, 192),
    "g5.48xlarge": ("a10g", 8, 0, 100, 1, 192, 768),
    "g6.xlarge": ("l4", 1, 0, 2.5, 0, 4, 16),
    "g6.12xlarge": ("l4", 4, 0, 40, 1, 48, 192),
    "g6.48xlarge": ("l4", 8, 0, 100, 1, 192, 768),
    "g6e.xlarge": ("l40s", 1, 0, 2.5, 0, 4, 32),
    "g6e.12xlarge": ("l40s", 4, 0, 100, 1, 48, 384),
    "g6e.24xlarge": ("l40s", 4, 0, 200, 2, 96, 768),
    "g6e.48xlarge": ("l40s", 8, 0, 400, 4, 192, 1536),
    "trn1.2xlarge": ("trainium", 1, 0, 3.125, 0, 8, 32),
    "trn1.32xlarge": ("trainium", 16, 0, 800, 8, 128, 512),
    "trn1n.32xlarge": ("trainium", 16, 0, 1600, 16, 128, 512),
    "trn2.48xlarge": ("trainium2", 16, 0, 3200, 16, 192, 2048),
    "BM.GPU4.8": ("a100-40", 8, 300, 1600, 16, 128, 2048),
    "BM.GPU.B4.8": ("a100-40", 8, 300, 1600, 16, 256, 2048),
    "BM.GPU.A100-v2.8": ("a100-80", 8, 300, 1600, 16, 256, 2048),
    "BM.GPU.H100.8": ("h100", 8, 450, 3200, 16, 224, 2048),
    "BM.GPU.H200.8": ("h200", 8, 450, 3200, 8, 224, 3072),
    "BM.GPU.B200.8": ("b200", 8, 900, 3200, 8, None, None),
    "BM.GPU.B300.8": ("b300", 8, 900, None, 16, None, None),
    "BM.GPU.GB200.4": ("gb200", 4, 900, 1600, 4, None, None),
}
EVERY_INSTANCE = list(instances().values())


@pytest.mark.parametrize("name", REFERENCE)
def test_catalog_has_every_row_of_the_reference_list(name):
    found = instances()[name]
    figures = (found.gpu, found.gpus, found.nvlink_gbytes_per_s, found.network_gbps, found.nics)
    figures += (found.cpus, found.memory_gib)
    for wanted, there in zip(REFERENCE[name], figures, strict=True):
        assert wanted is None or wanted == there


@pytest.mark.parametrize("table", ["instances.csv", "gpus.csv", "fabrics.csv", "prices.csv", "cloud_prices.csv"])
def test_tables_have_unique_rows_and_valid_cells(table):
    text = (TABLES / table).read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    names = [row["name"].lower() for row in rows]
    assert len(set(names)) == len(names)
    assert not set(text) & set("\"'?|\r\t")
    assert all(cell == cell.strip() for row in rows for cell in row.values())
    assert text.count(",") == (len(rows) + 1) * (len(rows[0]) - 1)


@pytest.mark.parametrize("family", ["m5", "c5", "m6i", "c6i", "m7i", "c7i", "t3"])
def test_catalog_has_the_cpu_families(family):
    found = [each for each in EVERY_INSTANCE if each.name.startswith(f"{family}.")]
    assert len(found) >= 6
    assert all(each.gpus == 0 and each.cpus and each.memory_gib for each in found)


def test_catalog_has_the_flexible_shapes():
    assert instances()["VM.Standard.E4.Flex"].flexible
    assert instances()["VM.Standard.E5.Flex"].flexible
    assert not instances()["BM.GPU.H100.8"].flexible


@pytest.mark.parametrize("instance", [each for each in EVERY_INSTANCE if each.gpus], ids=lambda each: each.name)
def test_gpu_instance_has_a_known_gpu_and_memory(instance):
    gpu = gpus()[instance.gpu]
    memory = instance.gpu_memory_gib or gpu.memory_gib
    assert 1 <= instance.gpus <= 16
    assert 0.9 * gpu.memory_gib <= memory <= 1.1 * gpu.memory_gib
    assert instance.nvlink_gbytes_per_s in (0, gpu.link_gbytes_per_s)
    assert instance.nvlink_gbytes_per_s == 0 or gpu.link.startswith("NVLink")


@pytest.mark.parametrize("instance", [each for each in EVERY_INSTANCE if not each.gpus], ids=lambda each: each.name)
def test_instance_without_gpus_has_no_gpu_figures(instance):
    assert (instance.gpu, instance.gpu_memory_gib, instance.nvlink_gbytes_per_s) == ("", None, 0)


@pytest.mark.parametrize("instance", EVERY_INSTANCE, ids=lambda each: each.name)
def test_instance_figures_are_plausible(instance):
    assert instance.provider in ("aws", "oci")
    assert instance.cpus is None or 2 <= instance.cpus <= 512
    assert instance.memory_gib is None or 1 <= instance.memory_gib <= 4096
    assert instance.network_gbps is None or 0.05 <= instance.network_gbps <= 6400
    assert instance.nics is None or 0 <= instance.nics <= 32
    if instance.cpus and instance.memory_gib:
        assert 0.25 <= instance.memory_gib / instance.cpus <= 32


@pytest.mark.parametrize("instance", EVERY_INSTANCE, ids=lambda each: each.name)
def test_instance_with_rdma_cards_has_a_fabric_of_its_cloud(instance):
    fabric = fabrics()[instance.fabric]
    assert fabric.rdma == (instance.nics != 0)
    assert fabric.provider in ("", instance.provider)


@pytest.mark.parametrize("gpu", list(gpus().values()), ids=lambda each: each.name)
def test_gpu_figures_are_plausible(gpu):
    assert gpu.kind in ("gpu", "neuron")
    assert gpu.name.startswith(gpu.slurm_type)
    assert 8 <= gpu.memory_gib <= 400
    assert 200 <= gpu.memory_gbytes_per_s <= 10_000
    assert gpu.bf16_tflops is None or 50 <= gpu.bf16_tflops <= 5_000
    assert gpu.link_gbytes_per_s is None or 0 <= gpu.link_gbytes_per_s <= 2_000


def test_trainium_has_the_gres_name_neuron():
    assert {gpu.kind for gpu in gpus().values() if gpu.name.startswith("trainium")} == {"neuron"}


def test_every_cloud_gpu_is_used_by_an_instance():
    used = {each.gpu for each in EVERY_INSTANCE}
    assert {"h100", "h200", "b200", "b300", "gb200", "a100-40", "a100-80", "l4", "l40s", "a10g"} <= used


def test_prices_are_of_known_instances_and_gpus_and_have_a_date():
    for price in prices().values():
        assert price.name in instances() or price.name in gpus(), price
        assert 0.1 < price.usd_per_gpu_hour < 50 and date.fromisoformat(price.date), price
        assert price.source.split()[-1] in instances() or price.source.startswith("Lambda "), price


def test_cloud_prices_have_a_unit_and_a_date_and_cover_every_machine_of_aws_without_gpus():
    for price in cloud_prices().values():
        assert price.unit in ("hour", "gib-month", "mbps-month") and date.fromisoformat(price.date), price
        assert 0.005 < price.usd < 15, price
    without_gpus = {each.name for each in EVERY_INSTANCE if each.provider == "aws" and not each.gpus}
    assert without_gpus <= cloud_prices().keys()
