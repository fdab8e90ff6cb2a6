//! A Debian with systemd as process 1, as a disk that the rig's machines boot: where
//! `cargo xtask dist --try` installs the packages. Made once, `target/kernels/debian.ext4`.

use std::fs::{self, File};

use anyhow::{Context, Result};

use super::apt;
use crate::{
    privilege::as_root,
    workspace::{Scratch, Workspace, on_path, run, say},
};

/// The release whose kernel the machine boots.
const RELEASE: &str = "bookworm";
/// Packages of the test's Debian besides the essential ones: a VMM, and the programs that the test
/// calls.
const PACKAGES: &str =
    "systemd-sysv,udev,dbus,iproute2,curl,socat,bpftool,rpm,qemu-system-x86,ipxe-qemu";
/// Size of the disk, bytes; what is not used takes no space.
const BYTES: u64 = 1 << 30;
/// Programs that make it, with their packages.
const TOOLS: [(&str, &str); 2] = [("mmdebstrap", "mmdebstrap"), ("mke2fs", "e2fsprogs")];

pub(super) fn find_or_make(workspace: &Workspace) -> Result<()> {
    let disk = workspace.kernels().join("debian.ext4");
    if disk.is_file() {
        return Ok(());
    }
    for (program, package) in TOOLS {
        if on_path(program).is_none() {
            apt::install(&[package])?;
        }
    }
    say(format!(
        "making {} from Debian's packages (minutes, once)",
        disk.display()
    ));
    let scratch = Scratch::below(&workspace.kernels())?;
    let (tree, made) = (scratch.path().join("tree"), scratch.path().join("disk"));
    // Ours, whoever fills it.
    File::create(&made)
        .and_then(|file| file.set_len(BYTES))
        .with_context(|| format!("could not make {}", made.display()))?;
    let filled = run(as_root("mmdebstrap")?
        .args(["--quiet", "--mode=root", "--variant=minbase"])
        .arg(format!("--include={PACKAGES}"))
        .arg(RELEASE)
        .arg(&tree))
    .and_then(|()| {
        run(as_root("mke2fs")?
            .args(["-q", "-F", "-t", "ext4", "-d"])
            .args([&tree, &made]))
    });
    // It is root's, and a failure that left it is not the one to tell.
    as_root("rm")
        .and_then(|mut rm| run(rm.arg("-rf").arg(&tree)))
        .ok();
    filled?;
    fs::rename(&made, &disk)?;
    Ok(())
}
