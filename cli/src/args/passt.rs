//! passt's options, as far as libvirt, libkrun and muvm give them to the program of that name.
use std::{net::IpAddr, path::PathBuf};

use clap::{ArgAction, Parser};

/// Be passt for a program that starts it: `slipgate attach --socket` or `--fd` by passt's options.
///
/// slipgate's own flags (--policy, --allow, --flow-log ...) come by SLIPGATE_PASST_FLAGS, a list of
/// words. See docs/attach-socket.md.
#[derive(Parser, Debug)]
#[command(
    name = "passt",
    version,
    disable_version_flag = true,
    args_override_self = true
)]
pub(crate) struct PasstArgs {
    /// Stay in the foreground
    #[arg(short, long)]
    pub(crate) foreground: bool,
    /// Say nothing but warnings and errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Say more
    #[arg(short, long)]
    pub(crate) debug: bool,
    /// Messages to stderr, where they go in the foreground anyway
    #[arg(short = 'e', long)]
    pub(crate) stderr: bool,
    /// Append messages to this file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) log_file: Option<PathBuf>,
    /// Write the process id to this file
    #[arg(short = 'P', long, value_name = "FILE")]
    pub(crate) pid: Option<PathBuf>,
    /// Listen here for the VMM
    #[arg(short, long, value_name = "PATH", required_unless_present = "fd")]
    pub(crate) socket: Option<PathBuf>,
    /// The VMM is connected by this inherited descriptor
    #[arg(short = 'F', long, value_name = "N", conflicts_with = "socket")]
    pub(crate) fd: Option<i32>,
    /// The VMM gives its card's rings by vhost-user
    #[arg(long, conflicts_with = "fd")]
    pub(crate) vhost_user: bool,
    /// End when the first guest has gone
    #[arg(short = '1', long)]
    pub(crate) one_off: bool,
    /// MTU in the lease, bytes
    #[arg(short, long, value_name = "N")]
    pub(crate) mtu: Option<String>,
    /// The guest's IPv4 address, with or without /PREFIX
    #[arg(short, long, value_name = "A", action = ArgAction::Append)]
    pub(crate) address: Vec<String>,
    /// Prefix length of the guest's network, or a netmask
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) netmask: Option<String>,
    /// The gateway's IPv4 address
    #[arg(short, long, value_name = "A")]
    pub(crate) gateway: Option<IpAddr>,
    /// Device that leads to the world
    #[arg(short, long, value_name = "IF")]
    pub(crate) interface: Option<String>,
    /// The gateway's MAC address: slipgate has one of its own, and this has no effect
    #[arg(short = 'M', long, value_name = "M")]
    pub(crate) mac_addr: Option<String>,
    /// Resolver; may be given several times
    #[arg(short = 'D', long, value_name = "A")]
    pub(crate) dns: Vec<String>,
    /// TCP ports of the host that lead to the guest: none, or [ADDR/]PORT[-PORT][:PORT[-PORT]],...
    #[arg(short, long, value_name = "SPEC")]
    pub(crate) tcp_ports: Vec<String>,
    /// The same of UDP
    #[arg(short, long, value_name = "SPEC")]
    pub(crate) udp_ports: Vec<String>,
    /// No IPv6 for the guest
    #[arg(short = '4', long)]
    pub(crate) ipv4_only: bool,
    /// Write the packets that the engine sees to this file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
}
