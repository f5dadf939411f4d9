"""The metrics that published dashboards query, by their id at grafana.com."""

from tests.observe.metric_names import expand

# All 26 queries are plain names, and a sum of seven of them.
SLURM_4323 = expand("""
    slurm_nodes_{alloc,comp,down,drain,err,fail,idle,maint,mix}
    slurm_queue_{cancelled,completed,completing,failed,node_fail,pending,preempted,running,suspended,timeout}
    slurm_scheduler_{threads,queue_size,last_cycle,mean_cycle,backfill_last_cycle,backfill_mean_cycle}
    slurm_scheduler_backfill_depth_mean
""")
SUM_4323 = "slurm_nodes_{alloc,down,drain,idle,mix,comp,maint}"
# Its last panel queries DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, which only DCGM itself can measure.
DCGM_12239 = expand("DCGM_FI_DEV_{GPU_TEMP,POWER_USAGE,SM_CLOCK,GPU_UTIL,FB_USED}")
# Without sensors, systemd and CPU frequencies, which virtual hosts do not have.
NODE_1860 = expand("""
    node_uname_info node_boot_time_seconds node_time_seconds node_load{1,5,15} node_cpu_seconds_total
    node_memory_{MemTotal,MemFree,MemAvailable,Buffers,Cached,SReclaimable,SwapTotal,SwapFree}_bytes
    node_filesystem_{size,avail,free}_bytes node_filesystem_{files,files_free,readonly,device_error}
    node_disk_{read,written}_bytes_total node_disk_{reads,writes}_completed_total node_disk_io_time_seconds_total
    node_network_{receive,transmit}_{bytes,packets,errs,drop}_total node_network_{carrier,mtu_bytes}
    node_netstat_Tcp_CurrEstab node_sockstat_TCP_inuse node_procs_{running,blocked} node_context_switches_total
    node_intr_total node_filefd_{allocated,maximum} node_vmstat_pgfault node_processes_state
    node_scrape_collector_{duration_seconds,success} node_textfile_scrape_error
""")
