//! Kernels for tests: Debian's cloud kernels, downloaded and unpacked into `target/kernels/SERIES`
//! but never installed, a busybox and a Debian's programs as their userspace, and QEMU to boot them.
//!
//! A Debian release has only some of them. The others are in neighbouring releases of the same
//! archive.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::{
    packages::{Lists, scratch_in, unpack},
    tools, userland,
};
use crate::workspace::{Workspace, capture, say};

/// Kernel series, each with the Debian release that contains it.
const KERNELS: [(&str, &str); 2] = [("6.1", "bookworm"), ("6.12", "trixie")];

/// Package of the only userspace program of a Linux guest; it is statically linked.
const BUSYBOX: &str = "busybox-static";

/// Programs that boot and unpack the kernels, with their packages.
const TOOLS: [tools::Tool; 2] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("xz", "xz-utils"),
];

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KERNELS.iter().map(|(series, _)| *series)
}

pub(super) fn find_or_fetch(workspace: &Workspace) -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        bail!("the kernels are for x86-64");
    }
    let missing = tools::install(&TOOLS)?;
    if !missing.is_empty() {
        bail!("there is no {}: install it", missing.join(", no "));
    }
    let folder = workspace.kernels();
    for (series, release) in KERNELS {
        if !folder.join(series).is_dir() {
            fetch(&folder, series, release)
                .with_context(|| format!("could not fetch a Linux {series}"))?;
        }
    }
    if !folder.join("busybox").is_dir() {
        fetch_busybox(&folder).context("could not fetch busybox")?;
    }
    userland::find_or_fetch(workspace)
}

fn fetch_busybox(folder: &Path) -> Result<()> {
    let scratch = scratch_in(folder)?;
    let package = Lists::of_this_machine().download(BUSYBOX, scratch.path())?;
    unpack(&package, scratch.path(), &folder.join("busybox"))
}

fn fetch(folder: &Path, series: &str, release: &str) -> Result<()> {
    let scratch = scratch_in(folder)?;
    let package = match download_kernel(&Lists::of_this_machine(), series, scratch.path()) {
        Ok(package) => package,
        Err(why) => {
            say(format!("{why:#}; looking in Debian's {release}"));
            let lists = Lists::of_release(release, scratch.path())?;
            download_kernel(&lists, series, scratch.path())?
        }
    };
    unpack(&package, scratch.path(), &folder.join(series))
}

/// Downloads the newest kernel of a series into `into`.
fn download_kernel(lists: &Lists, series: &str, into: &Path) -> Result<PathBuf> {
    let listed = capture(
        lists
            .apt("apt-cache")
            .args(["pkgnames", &format!("linux-image-{series}.")]),
    )?;
    let package = newest(&listed)
        .with_context(|| format!("there is no cloud kernel {series} in apt's lists"))?;
    lists.download(package, into)
}

/// Returns the cloud kernel package with the highest version in its name. Unsigned duplicates are
/// skipped.
fn newest(packages: &str) -> Option<&str> {
    let numbers = |package: &&str| -> Vec<u64> {
        package
            .split(|character: char| !character.is_ascii_digit())
            .filter_map(|digits| digits.parse().ok())
            .collect()
    };
    packages
        .lines()
        .filter(|package| package.ends_with("-cloud-amd64"))
        .max_by_key(numbers)
}

#[cfg(test)]
#[path = "kernels_test.rs"]
mod tests;
