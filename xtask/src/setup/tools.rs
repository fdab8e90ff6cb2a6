//! The programs that the testbed, the demo and the benchmarks call.

use anyhow::{Result, bail};

use super::apt;
use crate::workspace::on_path;

/// A program and its Debian package.
pub(super) type Tool = (&'static str, &'static str);

const TOOLS: [Tool; 15] = [
    ("ip", "iproute2"),
    ("iperf3", "iperf3"),
    ("nft", "nftables"),
    ("bpftool", "bpftool"),
    ("tcpdump", "tcpdump"),
    ("pasta", "passt"),
    ("slirp4netns", "slirp4netns"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("ethtool", "ethtool"),
    ("ping", "iputils-ping"),
    ("file", "file"),
    ("curl", "curl"),
    ("wg", "wireguard-tools"),
    // Of the packages with it, the one that starts no service.
    ("dhcpcd", "dhcpcd-base"),
    // For libFuzzer.
    ("c++", "g++"),
];

/// Programs that only the benchmarks call. Debian's unbound starts a service, so it is not
/// installed for the tests.
const OF_BENCHMARKS: [Tool; 3] = [
    ("dnsmasq", "dnsmasq-base"),
    ("unbound", "unbound"),
    ("socat", "socat"),
];

/// Programs that the demo of user mode calls: with these no package is installed, and nobody needs to be
/// root.
const OF_USER_MODE: [Tool; 3] = [
    ("ip", "iproute2"),
    ("setpriv", "util-linux"),
    ("unshare", "util-linux"),
];

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    TOOLS.iter().map(|(program, _)| *program)
}

pub(super) fn find_or_install() -> Result<()> {
    of(&TOOLS)
}

/// Finds or installs what the demo of user mode calls.
pub(super) fn find_or_install_of_user_mode() -> Result<()> {
    of(&OF_USER_MODE)
}

/// Finds or installs what only the benchmarks call, one by one, so that one that is missing does not
/// prevent the others.
pub(super) fn find_or_install_of_benchmarks() -> Result<()> {
    let failed = OF_BENCHMARKS.chunks(1).filter_map(|one| of(one).err());
    let failed: Vec<_> = failed.map(|why| format!("{why:#}")).collect();
    match failed.is_empty() {
        true => Ok(()),
        false => bail!("{}", failed.join("; ")),
    }
}

fn of(tools: &[Tool]) -> Result<()> {
    let missing = install(tools)?;
    if !missing.is_empty() {
        bail!(
            "these programs are missing: {}. Install them.",
            missing.join(", ")
        );
    }
    Ok(())
}

/// Installs the programs that are not here, where there is apt. Returns those that are still not.
pub(super) fn install(tools: &[Tool]) -> Result<Vec<&'static str>> {
    let missing = || tools.iter().filter(|tool| on_path(tool.0).is_none());
    let packages: Vec<_> = missing().map(|tool| tool.1).collect();
    if apt::is_here() && !packages.is_empty() {
        apt::install(&packages)?;
    }
    Ok(missing().map(|tool| tool.0).collect())
}
