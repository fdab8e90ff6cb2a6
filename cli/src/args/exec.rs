//! The flags of `slipgate exec`.
use std::{
    ffi::OsString,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use clap::Args;

use super::{ApiArgs, NatArgs};

#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct ExecArgs {
    /// The command's name in flows, stats and rules [default: exec-PID]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    #[command(flatten)]
    pub(crate) nat: NatArgs,
    /// The command, and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// Arguments of the command's process, which `exec` itself starts.
#[derive(Args, Debug)]
pub(crate) struct InsideArgs {
    #[arg(long)]
    pub(crate) fd: i32,
    #[arg(long)]
    pub(crate) guest: Ipv4Addr,
    #[arg(long)]
    pub(crate) prefix: u8,
    #[arg(long)]
    pub(crate) gateway: Ipv4Addr,
    #[arg(long)]
    pub(crate) dns: Ipv4Addr,
    #[arg(long)]
    pub(crate) mtu: u32,
    #[arg(long, requires = "gateway6")]
    pub(crate) guest6: Option<Ipv6Addr>,
    #[arg(long, requires = "guest6")]
    pub(crate) gateway6: Option<Ipv6Addr>,
    #[arg(long)]
    pub(crate) cover: Vec<PathBuf>,
    #[arg(long)]
    pub(crate) sockets: bool,
    #[arg(required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

const EXIT_CODES: &str = "\
Exit status:
  1        the command could not be started
  2        the command line can't be used, or a file that it names
  126, 127 the command can't be executed, or is not there
  N        the command ended with status N, or 128 more than the signal that ended it";
