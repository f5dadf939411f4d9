"""Names of metrics, as the sources of the exporters define them. `a_{b,c}` stands for two names."""

from __future__ import annotations

import re
from collections.abc import Iterator


def expand(text: str) -> set[str]:
    """Return the names in a text, with braces expanded."""
    return {name for word in text.split() for name in _braces(word)}


def _braces(word: str) -> Iterator[str]:
    found = re.search(r"\{([^{}]*)\}", word)
    if not found:
        yield word
        return
    for part in found[1].split(","):
        yield from _braces(word[: found.start()] + part + word[found.end() :])


VPENSO = expand("""
    slurm_cpus_{alloc,idle,other,total} slurm_gpus_{alloc,idle,total,utilization}
    slurm_node_{cpu_alloc,cpu_idle,cpu_other,cpu_total,mem_alloc,mem_total}
    slurm_nodes_{alloc,comp,down,drain,err,fail,idle,maint,mix,resv}
    slurm_partition_cpus_{allocated,idle,other,total} slurm_partition_jobs_pending
    slurm_queue_{pending,pending_dependency,running,suspended,cancelled,completing,completed,configuring}
    slurm_queue_{failed,timeout,preempted,node_fail}
    slurm_scheduler_{threads,queue_size,dbd_queue_size,last_cycle,mean_cycle,cycle_per_minute}
    slurm_scheduler_{backfill_last_cycle,backfill_mean_cycle,backfill_depth_mean}
    slurm_scheduler_{backfilled_jobs_since_start_total,backfilled_jobs_since_cycle_total}
    slurm_scheduler_backfilled_heterogeneous_total
    slurm_account_{jobs_pending,jobs_running,jobs_suspended,cpus_running,fairshare}
    slurm_user_{jobs_pending,jobs_running,jobs_suspended,cpus_running}
""")
SCKYZO = VPENSO | expand("""
    slurm_gpus_other slurm_node_status slurm_nodes_{other,planned,total}
    slurm_cores_{pending,running,suspended,cancelled,completing,completed,configuring,failed,timeout,preempted,node_fail}
    slurm_reservation_{info,start_time_seconds,end_time_seconds,node_count,core_count}
    slurm_rpc_stats{,_avg_time,_total_time} slurm_user_rpc_stats{,_avg_time,_total_time} slurm_info
    slurm_exporter_collector_{success,duration_seconds}
""")
OWN = expand("""
    dalsegno_{nodes,jobs,jobs_pending_reason,node_state,node_job,gpus,user_gpus,account_gpus,gpu_seconds_total}
    dalsegno_collector_{success,duration_seconds,last_success_timestamp_seconds,skipped_rows} dalsegno_build_info
    slurm_job_queue_wait_seconds{,_bucket,_sum,_count}
    training_{run_info,step,step_seconds,loss,samples_per_second,tokens_per_second,goodput_ratio,time_seconds_total}
    training_{badput_seconds_total,restarts_total,lost_nodes_total,generation,rank_step_ratio}
    training_last_step_timestamp_seconds
    dalsegno_recovery_{events_total,nodes,spares,budget_left,paused,held_back,replacements_failed_total}
    dalsegno_recovery_last_fault_timestamp_seconds
    dalsegno_recovery_{detect,drain,resume,replace}_seconds{,_bucket,_sum,_count}
""")
EFA = expand("""
    node_amazonefa_{alloc_pd_err,alloc_ucontext_err,cmds_err,completed_cmds,create_ah_err,create_cq_err,create_qp_err}
    node_amazonefa_{impaired_remote_conn_events,keep_alive_rcvd,lifespan,mmap_err,no_completion_cmds}
    node_amazonefa_{rdma_read_bytes,rdma_read_resp_bytes,rdma_read_wr_err,rdma_read_wrs,rdma_write_bytes}
    node_amazonefa_{rdma_write_recv_bytes,rdma_write_wr_err,rdma_write_wrs,recv_bytes,recv_wrs,reg_mr_err}
    node_amazonefa_{retrans_bytes,retrans_pkts,retrans_timeout_events,rx_bytes,rx_drops,rx_pkts,send_bytes,send_wrs}
    node_amazonefa_{submitted_cmds,tx_bytes,tx_pkts,unresponsive_remote_events}
""")
NODE = EFA | expand("""
    node_amazonefa_info dalsegno_fabric_{port_up,counter} dalsegno_node_metrics_{timestamp_seconds,success}
    DCGM_FI_DEV_{SM_CLOCK,MEM_CLOCK,MEMORY_TEMP,GPU_TEMP,POWER_USAGE,TOTAL_ENERGY_CONSUMPTION,PCIE_REPLAY_COUNTER}
    DCGM_FI_DEV_{GPU_UTIL,MEM_COPY_UTIL,ENC_UTIL,DEC_UTIL,XID_ERRORS,FB_FREE,FB_USED,FB_RESERVED,SLOWDOWN_TEMP}
    DCGM_FI_DEV_{UNCORRECTABLE_REMAPPED_ROWS,CORRECTABLE_REMAPPED_ROWS,ROW_REMAP_FAILURE,ROW_REMAP_PENDING}
    DCGM_FI_DEV_{ECC_SBE_VOL_TOTAL,ECC_DBE_VOL_TOTAL,POWER_VIOLATION,THERMAL_VIOLATION} DCGM_EXP_XID_ERRORS_COUNT
    DCGM_FI_PROF_{GR_ENGINE_ACTIVE,SM_ACTIVE,SM_OCCUPANCY,PIPE_TENSOR_ACTIVE,DRAM_ACTIVE}
    DCGM_FI_PROF_{PIPE_FP64_ACTIVE,PIPE_FP32_ACTIVE,PIPE_FP16_ACTIVE,PCIE_TX_BYTES,PCIE_RX_BYTES}
    DCGM_FI_PROF_{NVLINK_TX_BYTES,NVLINK_RX_BYTES}
""")
SERVED = VPENSO | SCKYZO | OWN | NODE

_SLINKY_STATES = (
    "bootfail,cancelled,completed,deadline,failed,pending,preempted,running,suspended,timeout,nodefail,outofmemory,"
    "completing,configuring,powerupnode,stageout,hold"
)
_SLINKY_JOBS = f"{{jobs,account_jobs,user_jobs,partition_jobs}}_{{{_SLINKY_STATES},cpus_alloc}}_total"
_NATIVE_JOBS = (
    "{bootfail,cancelled,completed,completing,configuring,cpus_alloc,deadline,expediting,failed,fed_requeued,finished,"
    "gpus_alloc,hold,memory_alloc,node_failed,nodes_alloc,outofmemory,pending,powerup_node,preempted,requeued,resizing,"
    "revoked,running,signaling,stageout,started,suspended,timeout}"
)
_NATIVE_NODES = (
    "{alloc,blocked,completing,cloud,down,drain,drained,draining,dyn_future,dyn_normal,external,fail,future,idle,"
    "invalid_reg,maint,mixed,noresp,planned,power_down,power_up,powered_down,powering_up,reboot_issued,reboot_req,resv,"
    "unknown}"
)
DIALECT_NAMES = {
    "rivosinc": expand("""
        slurm_cpus_{total,idle} slurm_cpu_load slurm_cpus_per_state slurm_node_count_per_state
        slurm_mem_{real,free,alloc} slurm_partition_{total_cpus,idle_cpus,real_mem,free_mem,weight,cpu_load}
        slurm_partition_{alloc_mem,alloc_cpus,node_count,job_state_total} slurm_user_{state_total,mem_alloc,cpu_alloc}
        slurm_account_job_state_{total,mem_alloc,cpu_alloc} slurm_pending_reason_total slurm_daemon_thread_count
        slurm_dbd_agent_queue_size slurm_backfill_{job_count,cycle_count,last_depth,last_depth_try_sched,cycle_counter}
    """),
    "slinky": expand(f"""
        slurm_jobs_total slurm_{_SLINKY_JOBS} slurm_jobs_memory_alloc_bytes slurm_nodes_total
        slurm_nodes_{{allocated,down,error,future,idle,mixed,unknown,completing,drain,fail,maintenance}}_total
        slurm_nodes_{{notresponding,planned,rebootrequested,reserved}}_total
        slurm_node_cpus_{{total,effective_total,alloc_total,idle_total}}
        slurm_node_memory_{{bytes,effective_bytes,alloc_bytes,free_bytes}}
    """),
    "slurm": expand(f"""
        slurm_jobs slurm_jobs_{_NATIVE_JOBS} slurm_nodes slurm_nodes_{_NATIVE_NODES}
        slurm_node_{{cpus,cpus_alloc,cpus_effective,cpus_idle,gpus,gpus_alloc}}
        slurm_node_memory_{{alloc_bytes,effective_bytes,free_bytes,bytes}} slurm_partitions
        slurm_partition_{{jobs,nodes,cpus,gpus}} slurm_partition_jobs_{_NATIVE_JOBS}
        slurm_partition_nodes_{_NATIVE_NODES} slurm_partition_nodes_cpus_{{alloc,idle,efctv}}
        slurm_{{agent_cnt,agent_queue_size,agent_thread_cnt,bf_active,bf_cycle_cnt,bf_cycle_last,bf_cycle_max}}
        slurm_{{bf_mean_cycle,bf_depth_mean,bf_last_depth,bf_queue_len,backfilled_jobs,backfilled_het_jobs}}
        slurm_{{last_backfilled_jobs,schedule_cycle_cnt,schedule_cycle_last,schedule_cycle_max,schedule_queue_len}}
        slurm_{{sched_mean_cycle,server_thread_cnt,slurmdbd_queue_size}}
    """),
    "otel": {f"{name}_total" for name in NODE if name not in ("node_amazonefa_info",)},
}
