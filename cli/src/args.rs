//! The command line as clap parses it. [`crate::config`] checks the meaning and the limits.
mod daemon;
mod exec;
mod passt;
mod policy;
mod run;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

pub(crate) use self::{
    daemon::{EventsArgs, ServeArgs, VmCommand, VmListArgs, VmPutArgs, VmRemoveArgs},
    exec::{ExecArgs, InsideArgs},
    passt::PasstArgs,
    policy::{
        CheckArgs, DiffArgs, ExplainArgs, LearnArgs, PolicyCommand, PutArgs, RemovePolicyArgs,
    },
    run::{CpuTemplate, Jail, OnReboot, RunArgs, in_units},
};
use slipgate_abi::Protocol;
use slipgate_policy::document::{Amount, Count, Quotas};

/// Least and most of an MTU, L3 bytes: RFC 791's, and a TAP's.
const MTU_BYTES: std::ops::RangeInclusive<u32> = 576..=65_521;

fn mtu(text: &str) -> Result<u32, String> {
    let (least, most) = (MTU_BYTES.start(), MTU_BYTES.end());
    let mtu = text.parse().ok().filter(|mtu| MTU_BYTES.contains(mtu));
    mtu.ok_or_else(|| format!("give {least} to {most} bytes, like 1500"))
}

/// Default address of the gateway.
pub(crate) const DEFAULT_GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// Default directory of the pins.
pub(crate) const DEFAULT_PIN_DIR: &str = "/sys/fs/bpf/slipgate";

/// eBPF-accelerated hybrid NAT for microVM TAP devices.
///
/// Every new flow is decided in userspace; every established packet is translated in the kernel.
#[derive(Parser, Debug)]
#[command(name = "slipgate", version, max_term_width = 100)]
pub(crate) struct CommandLine {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Give one or more TAP devices, or the guest of a socket, a network, until stopped
    Attach(Box<AttachArgs>),
    /// Boot a microVM with a network of its own
    Run(Box<RunArgs>),
    /// Run a command in a network of its own, without privileges
    Exec(Box<ExecArgs>),
    /// Serve VMs that come and go, until stopped
    Serve(Box<ServeArgs>),
    /// Add, change, remove and list the VMs of `slipgate serve`
    #[command(subcommand)]
    Vm(VmCommand),
    #[command(flatten)]
    Show(ShowCommand),
    /// Print what happens to VMs and flows of `slipgate serve`, as it happens
    Events(EventsArgs),
    /// Watch flows and VMs at work; cut, freeze and thaw them
    Top(TopArgs),
    /// Check, explain, compare and learn what may be reached, and change it
    #[command(subcommand)]
    Policy(PolicyCommand),
    #[command(flatten)]
    Control(ControlCommand),
    /// Be a CNI plugin: command by environment, configuration on stdin (see docs/deploy/cni.md)
    Cni,
    /// Say what this machine lacks, and how to get it
    Doctor(DoctorArgs),
    /// The engine process, started by `attach` and `run`
    #[command(hide = true)]
    Engine(ChildArgs),
    /// The command's process, started by `exec`
    #[command(hide = true)]
    Inside(InsideArgs),
    /// The VMM process, started by `run`
    #[command(hide = true)]
    Vmm(ChildArgs),
    /// The metrics process, started by `attach`, `run` and `serve`
    #[command(hide = true)]
    Metrics(ChildArgs),
    /// A process that answers the API, started by `serve`
    #[command(hide = true)]
    Api(ChildArgs),
    /// Write man pages and shell completions, for packages
    #[command(hide = true)]
    Manual {
        /// The folder; `man` and `completions` are made in it
        dir: PathBuf,
    },
}

/// Commands that change nothing.
#[derive(Subcommand, Debug)]
pub(crate) enum ShowCommand {
    /// List live flows
    Flows(FlowsArgs),
    /// Show packets, bytes, drops, refusals and ports
    Stats(StatsArgs),
    /// List the machines of `slipgate run` on this host
    Ps(PsArgs),
    /// Say which rule decides about a destination, and what would happen
    Why(WhyArgs),
}

/// Commands that change flows and VMs that are served.
#[derive(Subcommand, Debug)]
pub(crate) enum ControlCommand {
    /// End live flows now, and tell both ends
    Cut(CutArgs),
    /// End all flows of a restored or rolled-back VM, and tell both ends
    Generation(VmArgs),
    /// Drop everything from and to a VM at once, until it is thawed
    Freeze(VmArgs),
    /// Let a frozen VM's traffic pass again
    Thaw(VmArgs),
    /// Hold packets for a VM that is paused, until it is resumed
    Sleep(VmArgs),
    /// Pause the guest of a `slipgate run`
    Pause(MachineArgs),
    /// Have a paused guest of `slipgate run` go on, and deliver the packets that were held for a VM
    /// that slept; with another VMM, call it when its guest runs again
    Resume(VmArgs),
    /// Ask the guest of a `slipgate run --balloon` to give memory back, or to take it back
    Balloon(BalloonArgs),
    /// Write a snapshot of a `slipgate run`, from which `slipgate run --restore` goes on
    Snapshot(SnapshotArgs),
    /// End a `slipgate run` at once
    Kill(MachineArgs),
    /// Write a live flow's packets, as its guest sees them, to a pcapng file
    Capture(CaptureArgs),
    /// Stop `slipgate serve`: end its VMs and their flows, remove everything from the kernel
    Stop(StopArgs),
}

#[derive(Args, Debug)]
#[command(after_help = AS_PASST)]
pub(crate) struct AttachArgs {
    /// A VM: name=NAME,tap=IF[,mac=M][,ip=A][,max-flows=N][,policy=NAME]; may be given several times
    #[arg(long, value_name = "SPEC")]
    pub(crate) vm: Vec<String>,
    /// Short for --vm name=IF,tap=IF; may be given several times
    #[arg(long, value_name = "IF")]
    pub(crate) tap: Vec<String>,
    #[command(flatten)]
    pub(crate) nat: NatArgs,
    /// Fate of flows and pins at an orderly stop
    #[arg(long, value_enum, default_value_t = OnExit::Detach)]
    pub(crate) on_exit: OnExit,
    /// Start processes of its own beside those of `slipgate serve`, which else serves the VMs
    #[arg(long)]
    pub(crate) own: bool,
    /// Instead of TAPs, and without privileges: listen here for one guest by QEMU's `-netdev stream`,
    /// passt's protocol
    #[arg(long, value_name = "PATH", group = "link", conflicts_with_all = ["vm", "tap", "own"])]
    pub(crate) socket: Option<PathBuf>,
    /// Likewise, by vhost-user: QEMU, Cloud Hypervisor or crosvm gives the rings of its guest's
    /// network card
    #[arg(long, value_name = "PATH", group = "link", conflicts_with_all = ["vm", "tap", "own"])]
    pub(crate) vhost_user: Option<PathBuf>,
    /// Likewise, by a connected stream socket that this process inherits as descriptor N: passt's
    /// protocol, until that connection ends
    #[arg(long, value_name = "N", group = "link", conflicts_with_all = ["vm", "tap", "own"])]
    pub(crate) fd: Option<i32>,
    /// The name of the guest of --socket, --vhost-user or --fd in flows, stats and rules [default: the
    /// socket's file name, without its ending; with --fd guest-PID]
    #[arg(long, value_name = "NAME", requires = "link", conflicts_with_all = ["vm", "tap"])]
    pub(crate) name: Option<String>,
    /// End when the first guest of --socket or --vhost-user has gone
    #[arg(long, requires = "link", conflicts_with_all = ["vm", "tap"])]
    pub(crate) one_off: bool,
    /// With --socket, --vhost-user or --fd: write the process id to this file once the guest may
    /// connect, and remove it at the end
    #[arg(long, value_name = "FILE", requires = "link", conflicts_with_all = ["vm", "tap"])]
    pub(crate) pid_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
}

const AS_PASST: &str = "\
Programs that start passt (libvirt, muvm): `slipgate passt`, or slipgate under that name, takes the \
options that they give, and flags of this command by SLIPGATE_PASST_FLAGS";

impl AttachArgs {
    /// Whether it is about a guest by a socket, in user mode.
    pub(crate) fn has_link(&self) -> bool {
        self.socket.is_some() || self.vhost_user.is_some() || self.fd.is_some()
    }
}

/// Where the API is answered: by `serve`, and in user mode.
#[derive(Args, Debug)]
pub(crate) struct ApiArgs {
    /// Answer the API on this Unix socket, for this user and the group (`serve`, and in user mode)
    #[arg(long, value_name = "PATH[,group=NAME]")]
    pub(crate) api: Option<String>,
    /// Answer the API on this Unix socket too, for reading alone
    #[arg(long, value_name = "PATH[,group=NAME]")]
    pub(crate) api_read: Option<String>,
}

/// The flags that say how guests reach the world.
#[derive(Args, Debug)]
#[command(next_help_heading = "NAT")]
pub(crate) struct NatArgs {
    /// Where established flows are translated
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    pub(crate) mode: Mode,
    /// Device that leads to the world [default: the default route's]
    #[arg(long, value_name = "IF")]
    pub(crate) uplink: Option<String>,
    /// Routes of VMs whose policy names none [default: uplink]
    #[arg(long, value_name = "WHOSE", value_enum)]
    pub(crate) egress_routes: Option<EgressRoutes>,
    /// The guests' address, unless a --vm says ip=
    #[arg(long, value_name = "A", default_value = "10.0.2.15")]
    pub(crate) guest_ip: String,
    /// The gateway's address as guests see it; the next one up is their DNS server
    #[arg(long, value_name = "A", default_value_t = DEFAULT_GATEWAY.to_string())]
    pub(crate) gateway: String,
    /// Prefix length of the guests' network
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u8).range(1..=30))]
    pub(crate) prefix: u8,
    /// Whether guests have IPv6: translated to the uplink's address (nat; auto: once the uplink, or a
    /// device of the routes that the VM's policy names, has an address and a route), or with their own
    /// addresses (routed:PREFIX, a prefix that the network routes to this host, of which each VM gets a
    /// /64, or an address if it is longer than 64 bits)
    #[arg(long, value_name = "off|nat|auto|routed:P", default_value = "off")]
    pub(crate) ipv6: Ipv6,
    /// Prefix of the guests' IPv6 addresses, a /64 [default: fd73:6c69:7067::/64]
    #[arg(long, value_name = "P/64")]
    pub(crate) ipv6_prefix: Option<String>,
    /// MTU given to guests, bytes [default: the TAP's]
    #[arg(long, value_name = "N", value_parser = mtu, allow_negative_numbers = true)]
    pub(crate) mtu: Option<u32>,
    /// Resolver to forward guests' questions to, of IPv6 with a port as [A]:P; may be given several
    /// times; or none, and every question is refused [default: the host's]
    #[arg(long, value_name = "A[:P]|none")]
    pub(crate) dns: Vec<String>,

    /// Rules, quotas, DNS and forwards from a TOML file; rules typed here come before its, and flags
    /// beat it (see `slipgate policy`)
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// The policy in that file of VMs that name none [default: its top level]
    #[arg(long, value_name = "NAME", requires = "policy")]
    pub(crate) policy_name: Option<String>,
    /// Action for a flow that no rule matches [default: the policy file's, or allow]
    #[arg(long, value_enum)]
    pub(crate) default: Option<DefaultRule>,
    /// Allow flows to CIDR[:PORT[-PORT]][/tcp|udp|icmp], or to a name such as example.com or
    /// *.example.com in place of the CIDR; may be given several times, and rules are tried in the
    /// order typed
    #[arg(long, value_name = "RULE")]
    pub(crate) allow: Vec<String>,
    /// Refuse flows to CIDR[:PORT[-PORT]][/tcp|udp|icmp], or questions for a name; may be given
    /// several times
    #[arg(long, value_name = "RULE")]
    pub(crate) deny: Vec<String>,
    /// Like --allow, and what the connection says it is for (TLS, HTTP/1, QUIC) must be a name that
    /// the rules let in at that address; may be given several times
    #[arg(long, value_name = "RULE")]
    pub(crate) inspect: Vec<String>,
    /// Refuse flows to what the file lists, one RULE per line; may be given several times
    #[arg(long, value_name = "F")]
    pub(crate) deny_file: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) quotas: QuotaArgs,

    /// Host port(s) that lead to a guest: [VM=]tcp|udp:[ADDR:]PORT[-PORT]:PORT[-PORT]; or port(s) of its
    /// own routed addresses that the world may open: [VM=]tcp|udp:own:PORT[-PORT]; VM= is needed when there
    /// are several
    #[arg(long, value_name = "SPEC")]
    pub(crate) forward: Vec<String>,

    /// Port(s) of the gateway that lead guests to the host's loopback, the same port or another:
    /// [ADDR:]PORT[-PORT][:PORT[-PORT]][/tcp|udp]; may be given several times [default: none]
    #[arg(long, value_name = "SPEC")]
    pub(crate) host_loopback: Vec<String>,

    /// Ports for translated flows, all of them toward each destination; keep clear of
    /// net.ipv4.ip_local_port_range
    #[arg(long, value_name = "A-B", default_value = "61000-65535")]
    pub(crate) nat_ports: String,
    /// Ports for flows whose policy asks for endpoint-independent mapping ([nat]), none of them in
    /// --nat-ports; keep clear of net.ipv4.ip_local_port_range and the host's services
    /// [default: none]
    #[arg(long, value_name = "A-B")]
    pub(crate) eim_ports: Option<String>,
    /// The one source address of translated flows, an address of this host [default: the route's]
    #[arg(long, value_name = "A")]
    pub(crate) nat_address: Option<String>,
    /// Where the host's own NAT or sockets may use ports of --nat-ports with the source address of
    /// guests' flows: `refuse` to start, or `share` it, at the cost of connections that break
    #[arg(long, value_name = "MODE", value_enum, default_value_t = HostNat::Refuse)]
    pub(crate) host_nat: HostNat,
    /// Flows the table can hold, all processes together, a multiple of 1024; the first process in
    /// a network namespace decides
    #[arg(long, value_name = "N", default_value_t = slipgate_abi::maps::DEFAULT_SLOTS)]
    pub(crate) flow_table: u32,
    /// VMs there can be, all processes together, up to 65535; the first process in a network
    /// namespace decides
    #[arg(long, value_name = "N", default_value_t = slipgate_abi::maps::DEFAULT_VMS)]
    pub(crate) max_vms: u32,
    /// Rules that policies can have, all processes together, up to 262144: three of each policy's
    /// own included; the first process in a network namespace decides
    #[arg(long, value_name = "N", default_value_t = slipgate_abi::maps::DEFAULT_RULES)]
    pub(crate) max_rules: u32,
    /// Directory in bpffs for pins, one sub-directory per network namespace
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
    /// Append JSON lines to this file, made with mode 0640: starts and ends of flows, DNS
    /// questions, what was refused
    #[arg(long, value_name = "FILE")]
    pub(crate) flow_log: Option<PathBuf>,
    /// Which of them, separated by commas
    #[arg(
        long,
        value_name = "EVENTS",
        value_enum,
        value_delimiter = ',',
        requires = "flow_log",
        default_value = "flow_start,flow_end,dns,refused",
        hide_possible_values = true
    )]
    pub(crate) flow_log_events: Vec<FlowLogEvent>,
    /// Write the packets that the engine sees to this file as pcapng, made with mode 0640: first
    /// packets, refused ones, DNS, DHCP, ... but none that the kernel translates by itself
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    /// Answer Prometheus here, GET /metrics, from a process without privileges; whoever can
    /// connect can read, so prefer loopback
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Drop unwanted frames early, by XDP on the TAPs
    #[arg(long, value_enum, default_value_t = Xdp::Auto)]
    pub(crate) xdp: Xdp,
    /// Load the programs that log what they decide (slow)
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) bpf_log: bool,
    /// Messages on stderr: error, warn, info, debug, trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(crate) log: String,
}

/// Limits of a VM.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct QuotaArgs {
    /// Flows a VM may have at once; when the table runs full each VM keeps a share [default: 16384]
    #[arg(long, value_name = "N")]
    pub(crate) max_flows: Option<Count>,
    /// New flows a VM may open per second on average, and as many at once [default: 2000]
    #[arg(long, value_name = "N")]
    pub(crate) new_flows_per_second: Option<Count>,
    /// L3 bytes per second from each VM, like 10M or 64Ki; 0: no limit [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) tx_bytes_per_second: Option<Amount>,
    /// L3 bytes per second to each VM; 0: no limit [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) rx_bytes_per_second: Option<Amount>,
    /// Packets per second from each VM, large ones counted as on the wire; 0: no limit [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) tx_packets_per_second: Option<Amount>,
    /// Packets per second to each VM; 0: no limit [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) rx_packets_per_second: Option<Amount>,
    /// Questions each VM may ask of DNS per second [default: no limit]
    #[arg(long, value_name = "N")]
    pub(crate) dns_per_second: Option<Count>,
}

impl QuotaArgs {
    /// The limits that were given.
    pub(crate) fn quotas(&self) -> Quotas {
        Quotas {
            max_flows: self.max_flows,
            new_flows_per_second: self.new_flows_per_second,
            tx_bytes_per_second: self.tx_bytes_per_second,
            rx_bytes_per_second: self.rx_bytes_per_second,
            tx_packets_per_second: self.tx_packets_per_second,
            rx_packets_per_second: self.rx_packets_per_second,
            dns_per_second: self.dns_per_second,
            ..Quotas::default()
        }
    }
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// Hybrid where possible; else `slipgate run` says why not and goes on in user mode
    Auto,
    /// Translate in the kernel
    Hybrid,
    /// Translate in the engine, without privileges (`slipgate run`, `exec` and `attach --socket` only)
    Userspace,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DefaultRule {
    /// Admit the flow, unless it is to protected space
    Allow,
    /// Refuse the flow
    Deny,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EgressRoutes {
    /// Those of the table main by the uplink
    Uplink,
    /// Those that the host's own packets would take, by whatever device: its rules (ip rule) and all
    /// their tables
    Host,
}

/// Whether guests have IPv6.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ipv6 {
    /// Give guests no IPv6
    Off,
    /// IPv6 translated to the uplink's address
    Nat,
    /// As nat, once the uplink or the policy's routes lead to IPv6
    Auto,
    /// Not translated; with the prefix that the network routes to this host, if it was given
    Routed(Option<String>),
}

impl FromStr for Ipv6 {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text.split_once(':') {
            None if text == "off" => Self::Off,
            None if text == "nat" => Self::Nat,
            None if text == "auto" => Self::Auto,
            None if text == "routed" => Self::Routed(None),
            Some(("routed", prefix)) => Self::Routed(Some(prefix.to_owned())),
            _ => return Err("give off, nat, auto or routed:PREFIX".to_owned()),
        })
    }
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostNat {
    /// Fail at the start, and say what to set
    Refuse,
    /// Log it, and share the ports
    Share,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Xdp {
    /// Attach the program where the device offers no TSO, which XDP would cost
    Auto,
    /// Attach the program, or fail
    On,
    /// Do not attach the program
    Off,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
#[value(rename_all = "snake_case")]
pub(crate) enum FlowLogEvent {
    /// A flow was admitted
    FlowStart,
    /// A flow has ended
    FlowEnd,
    /// A DNS question was answered, or refused
    Dns,
    /// New flows and questions were refused; summed up
    Refused,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OnExit {
    /// End flows, take the TAPs down, remove programs and pins
    Detach,
    /// Leave flows running in the kernel for the next `attach` to adopt
    Keep,
}

#[derive(Args, Debug)]
pub(crate) struct FlowsArgs {
    /// Show only flows of this VM
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
    /// Show only flows of this protocol
    #[arg(long, value_name = "P", value_enum)]
    pub(crate) proto: Option<Proto>,
    /// Only those that a name let in: example.com, or *.example.com for any name below it
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// In which order [default: the table's]
    #[arg(long, value_name = "BY", value_enum)]
    pub(crate) sort: Option<FlowOrder>,
    /// As an array of JSON objects
    #[arg(long)]
    pub(crate) json: bool,
    /// Again every second, until stopped
    #[arg(long)]
    pub(crate) watch: bool,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FlowOrder {
    /// Most bytes first, both ways together
    Bytes,
    /// By packets, most first
    Packets,
    /// By start, oldest first
    Age,
    /// By silence, longest first
    Idle,
    /// By VM, then guest's address and port
    Vm,
    /// By the name that let it in, then remote address
    Name,
}

#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// Show only flows of this VM
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
    /// Order of the flows
    #[arg(long, value_name = "BY", value_enum, default_value_t = TopOrder::Rate)]
    pub(crate) sort: TopOrder,
    /// One picture as text, after a second; also when stdout or stdin is no terminal
    #[arg(long)]
    pub(crate) once: bool,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum TopOrder {
    /// Most bytes per second first
    #[default]
    Rate,
    /// By bytes, most first
    Bytes,
    /// By start, oldest first
    Age,
    /// By name, or address where none let it in
    Name,
}

#[derive(Args, Debug)]
pub(crate) struct StatsArgs {
    /// As one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Show only this VM
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
    /// Again every second, until stopped
    #[arg(long)]
    pub(crate) watch: bool,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
#[command(after_help = WHY_EXIT_STATUS)]
pub(crate) struct WhyArgs {
    /// Name of the VM
    pub(crate) vm: String,
    /// Where it would connect to, HOST:PORT; for icmp the host alone. A name is judged as the VM
    /// would come there: by asking for it first
    pub(crate) destination: String,
    /// Protocol of the flow
    #[arg(long, value_name = "P", value_enum, default_value_t = Proto::Tcp)]
    pub(crate) proto: Proto,
    /// As one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

const WHY_EXIT_STATUS: &str = "\
Exit status:
  0  yes: the flow would be admitted
  1  it could not be found out
  2  the command line can't be used
  3  no: the flow would be refused";

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Proto {
    /// A TCP connection
    Tcp,
    /// A UDP datagram
    Udp,
    /// An ICMP echo (ping)
    Icmp,
}

impl From<Proto> for Protocol {
    fn from(proto: Proto) -> Self {
        match proto {
            Proto::Tcp => Protocol::Tcp,
            Proto::Udp => Protocol::Udp,
            Proto::Icmp => Protocol::Icmp,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct ApplyArgs {
    /// Another policy file, in the place of the one in force; rules typed at the start stay before
    /// its own [default: the one in force, read again]
    pub(crate) file: Option<PathBuf>,
    /// A VM of the process that is meant; needed when several run
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct CutArgs {
    /// Flows, by their id in `slipgate flows`; or VMs, of which every flow is meant
    #[arg(value_name = "FLOW|VM", required_unless_present = "vm")]
    pub(crate) what: Vec<String>,
    /// Every flow of this VM; may be given several times
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Vec<String>,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct VmArgs {
    /// Name of the VM
    pub(crate) vm: String,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct PsArgs {
    /// As an array of JSON objects
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct MachineArgs {
    /// The VM's name, or the process id of its `slipgate run` (see `slipgate ps`)
    #[arg(value_name = "NAME|PID")]
    pub(crate) machine: String,
}

#[derive(Args, Debug)]
pub(crate) struct BalloonArgs {
    /// The VM's name, or the process id of its `slipgate run` (see `slipgate ps`)
    #[arg(value_name = "NAME|PID")]
    pub(crate) machine: String,
    /// Memory that the guest is to give back in all, MiB, or with a unit, like 2G; 0: it takes back
    /// what it has given
    #[arg(value_name = "MIB", value_parser = run::mebibytes)]
    pub(crate) size: u64,
}

#[derive(Args, Debug)]
pub(crate) struct SnapshotArgs {
    /// The VM's name, or the process id of its `slipgate run` (see `slipgate ps`)
    #[arg(value_name = "NAME|PID")]
    pub(crate) machine: String,
    /// Directory for the snapshot, which is made and must not exist yet
    pub(crate) dir: PathBuf,
    /// Save only what differs from the snapshot in this directory, without which the new one can't be
    /// restored
    #[arg(long, value_name = "BASE")]
    pub(crate) diff: Option<PathBuf>,
    /// Have the VM sleep, and end its machine when the snapshot is whole: `slipgate serve` keeps the VM,
    /// and holds what comes for it until `slipgate run --restore DIR --as NAME`
    #[arg(long)]
    pub(crate) sleep: bool,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct StopArgs {
    /// Leave flows and VMs for the next `slipgate serve`, as on SIGTERM
    #[arg(long)]
    pub(crate) keep: bool,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct CaptureArgs {
    /// The flow, by its id in `slipgate flows`; relayed ones (rID) are in --vm alone
    #[arg(required_unless_present = "vm", conflicts_with = "vm")]
    pub(crate) flow: Option<String>,
    /// Everything of this VM, whatever flow it is of, ARP and DHCP too
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
    /// Where to [default: stdout, which may not be a terminal]
    #[arg(short, long, value_name = "FILE|-")]
    pub(crate) output: Option<PathBuf>,
    /// End after so long
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: Option<u64>,
    /// End after so many packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Device that leads to the world [default: the default route's, and of the host's NAT those of the
    /// slipgate that serves here]
    #[arg(long, value_name = "IF")]
    pub(crate) uplink: Option<String>,
    /// Ports for translated flows that a start will be given
    /// [default: those of the slipgate that serves here, or 61000-65535]
    #[arg(long, value_name = "A-B")]
    pub(crate) nat_ports: Option<String>,
    /// Ports for endpoint-independent mapping that a start will be given [default: likewise, or none]
    #[arg(long, value_name = "A-B")]
    pub(crate) eim_ports: Option<String>,
    /// Source address that a start will be given [default: the route's]
    #[arg(long, value_name = "ADDR")]
    pub(crate) nat_address: Option<String>,
    /// As an array of JSON objects
    #[arg(long)]
    pub(crate) json: bool,
    /// Directory in bpffs that `attach` will be given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct ChildArgs {
    /// The channel to the broker, an inherited descriptor
    #[arg(long)]
    pub(crate) fd: i32,
    /// The user and group that it is from then on
    #[arg(long)]
    pub(crate) user: u32,
}
