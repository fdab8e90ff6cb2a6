//! The flags of `slipgate serve` and `slipgate vm`.
use std::{net::Ipv4Addr, os::fd::RawFd, path::PathBuf};

use clap::{Args, Subcommand};

use super::{ApiArgs, DEFAULT_PIN_DIR, Ipv6, NatArgs, OnExit, QuotaArgs};

#[derive(Args, Debug)]
#[command(args_override_self = true)]
pub(crate) struct ServeArgs {
    /// Flags from a TOML file, as in `uplink = "eth0"`; flags typed here beat it
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Give Prometheus the VMs' labels of this key, as slipgate_vm_info; may be given several times
    #[arg(long, value_name = "KEY", requires = "metrics")]
    pub(crate) metrics_label: Vec<String>,
    /// Tell clients of the API when no packet of a VM's guest or to it was seen for so long, and
    /// when there is one again; 0: don't
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) idle_after: u32,
    /// Let clients of the API have snapshots of machines of `slipgate run` made in this directory, which
    /// must be yours alone
    #[arg(long, value_name = "DIR")]
    pub(crate) snapshot_dir: Option<PathBuf>,
    /// Most snapshots in that directory: beyond that clients have none made until some are removed
    #[arg(
        long,
        value_name = "N",
        default_value_t = 64,
        requires = "snapshot_dir"
    )]
    pub(crate) snapshots_max: u32,
    /// Share the VMs out among so many engines, each a process of one thread; a VM's new flows are
    /// admitted by the one that has it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) workers: usize,
    /// Take over from the daemon that serves here, if one does, which then ends: no packet is lost
    #[arg(long)]
    pub(crate) take_over: bool,
    #[command(flatten)]
    pub(crate) nat: NatArgs,
    /// Fate of flows, VMs and pins at an orderly stop
    #[arg(long, value_enum, default_value_t = OnExit::Keep)]
    pub(crate) on_exit: OnExit,
}

#[derive(Subcommand, Debug)]
pub(crate) enum VmCommand {
    /// Serve a VM; the same command twice changes nothing
    Add(Box<VmPutArgs>),
    /// Change what is given of a VM, and leave the rest
    Set(Box<VmPutArgs>),
    /// End VMs' flows and serve them no more
    Rm(VmRemoveArgs),
    /// Keep VMs that `attach` or `run` has brought when these commands end
    Keep(VmRemoveArgs),
    /// List the VMs with their states
    Ls(VmListArgs),
}

#[derive(Args, Debug)]
pub(crate) struct VmPutArgs {
    /// Name of the VM
    pub(crate) name: String,
    /// The TAP that its VMM has open, or will have [default: the VM's name]
    #[arg(long, value_name = "IF")]
    pub(crate) tap: Option<String>,
    /// The same TAP as an open descriptor, which this command was started with
    #[arg(long, value_name = "N", conflicts_with = "tap")]
    pub(crate) tap_fd: Option<RawFd>,
    /// The guest's MAC: frames from another are dropped [default: any]
    #[arg(long, value_name = "MAC")]
    pub(crate) mac: Option<String>,
    /// The guest's address [default: --guest-ip of `slipgate serve`]
    #[arg(long, value_name = "A")]
    pub(crate) ip: Option<Ipv4Addr>,
    /// Whether the guest has IPv6; routed: with its own addresses, of a /64 of the daemon's or of
    /// routed:P/64, or a single one, routed:A/128 [default: --ipv6 of `slipgate serve`]
    #[arg(long, value_name = "off|nat|auto|routed[:P]")]
    pub(crate) ipv6: Option<Ipv6>,
    /// Prefix of the guest's IPv6 addresses, a /64 [default: --ipv6-prefix of `slipgate serve`]
    #[arg(long, value_name = "P/64")]
    pub(crate) ipv6_prefix: Option<String>,
    /// Its policy, by name [default: as for VMs that name none]
    #[arg(long, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// File with a policy for this VM: TOML with the keys of [policy.NAME] in a policy file
    #[arg(long, value_name = "FILE", conflicts_with = "policy")]
    pub(crate) policy_file: Option<PathBuf>,
    /// The only device by which its flows leave; while it does not exist, none does [default:
    /// --uplink of `slipgate serve`]
    #[arg(long, value_name = "IF")]
    pub(crate) uplink: Option<String>,
    /// With `set`: use the uplink of `slipgate serve` again
    #[arg(long, conflicts_with = "uplink")]
    pub(crate) no_uplink: bool,
    /// An address or prefix of the host's that is this VM's alone, as its flows' source toward the
    /// world; may be given several times [default: those of its policy]
    #[arg(long, value_name = "A[/N]")]
    pub(crate) nat_address: Vec<String>,
    /// With `set`: use the addresses of its policy again
    #[arg(long, conflicts_with = "nat_address")]
    pub(crate) no_nat_address: bool,
    /// When it counts as idle; 0: never [default: --idle-after of `slipgate serve`]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) idle_after: Option<u32>,
    /// A label for your own use; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) label: Vec<(String, String)>,
    /// Lead a port of the host to the guest, or open one of its own routed addresses (tcp|udp:own:PORT);
    /// with `set`, all that there are to be
    #[arg(long, value_name = "tcp|udp:[ADDR:]PORT:PORT")]
    pub(crate) forward: Vec<String>,
    /// With `set`: forward nothing any more
    #[arg(long, conflicts_with = "forward")]
    pub(crate) no_forward: bool,
    /// Lead a port of the gateway to the host's loopback; with `set`, all that there are to be
    #[arg(long, value_name = "[ADDR:]PORT[:PORT][/tcp|udp]")]
    pub(crate) host_loopback: Vec<String>,
    /// With `set`: lead nothing there any more but what its policy lists
    #[arg(long, conflicts_with = "host_loopback")]
    pub(crate) no_host_loopback: bool,
    #[command(flatten)]
    pub(crate) quotas: QuotaArgs,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct VmRemoveArgs {
    /// Names of the VMs
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct EventsArgs {
    /// Show only events of this VM
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
    /// Only this kind, like vm_added or flow_end; or all; may be given several times [default: all
    /// but those of flows and DNS]
    #[arg(long, value_name = "KIND")]
    pub(crate) kind: Vec<String>,
    /// Begin behind the event of this number [default: what happens from now on]
    #[arg(long, value_name = "N")]
    pub(crate) after: Option<u64>,
    /// A JSON object a line, as the API has them
    #[arg(long)]
    pub(crate) json: bool,
    /// Socket of the API, of user mode's too [default: the daemon's of this network namespace]
    #[arg(long, value_name = "PATH")]
    pub(crate) api: Option<PathBuf>,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct VmListArgs {
    /// As an array of JSON objects
    #[arg(long)]
    pub(crate) json: bool,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

fn label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = parts.ok_or("give KEY=VALUE, like tenant=a")?;
    Ok((key.to_owned(), value.to_owned()))
}
