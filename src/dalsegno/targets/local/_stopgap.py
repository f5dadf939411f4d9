import enum, os
from dataclasses import dataclass
class NodeState(enum.Enum):
    IDLE=1; ALLOCATED=2; MIXED=3; DOWN=4; UNKNOWN=5; FUTURE=6
class NodeFlag(enum.Enum):
    NOT_RESPONDING=1; DRAIN=2
@dataclass(frozen=True)
class NodeInfo:
    name:str; state:NodeState; flags:frozenset; reason:str; state_text:str; gpus:int=0; gpus_used:int=0
class JobState(enum.Enum):
    RUNNING=1; PENDING=2; OTHER=3
    @property
    def ended(self): return self is JobState.OTHER
@dataclass(frozen=True)
class JobInfo:
    id:str; name:str; user:str; partition:str; state:JobState; nodes:str; gpus:int; elapsed:str; reason:str
@dataclass(frozen=True)
class Ping:
    up: bool
class SlurmClient:
    def __init__(self, runner, env): self.r=runner; self.env=env
    def q(self,*a,check=True):
        d=self.r.run(a,env={**os.environ,**self.env},timeout_s=60); return d.checked() if check else d
    def ping(self):
        o=self.q('scontrol','ping',check=False).stdout
        return [Ping('is UP' in l) for l in o.splitlines()] or [Ping(False)]
    def nodes(self):
        out=[]
        for l in self.q('sinfo','-h','-N','-o','%N|%T|%E|%G').stdout.splitlines():
            n,t,e,g=l.split('|'); base=t.rstrip('*~#$@+')
            st={'idle':NodeState.IDLE,'down':NodeState.DOWN,'unknown':NodeState.UNKNOWN}.get(base,NodeState.MIXED)
            out.append(NodeInfo(n,st,frozenset([NodeFlag.NOT_RESPONDING] if '*' in t else []),'' if e=='none' else e,t))
        return out
    def jobs(self):
        out=[]
        for l in self.q('squeue','-h','-t','all','-o','%i|%j|%u|%P|%T|%N|%M|%r').stdout.splitlines():
            i,j,u,p,t,n,m,r=l.split('|'); out.append(JobInfo(i,j,u,p,getattr(JobState,t,JobState.OTHER),n,0,m,r))
        return out
    def reconfigure(self): self.q('scontrol','reconfigure')
    def drain(self,n,r): self.q('scontrol','update',f'nodename={n}','state=drain',f'reason={r}')
    def resume(self,n): self.q('scontrol','update',f'nodename={n}','state=resume')
    def update_partition(self,n,state): self.q('scontrol','update',f'partitionname={n}',f'state={state}')
    def sacctmgr(self,*a): return self.q('sacctmgr','-i',*a)
