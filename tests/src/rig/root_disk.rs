//! A disk with a Debian, whose ext4 file system is the root of a Linux client, and the initramfs that a kernel
//! needs whose drivers of the disk are modules.
//!
//! The Debian is what its packages have: its init (sysvinit), shell and tools, unpacked by `cargo xtask setup`
//! and configured here by one file, `/etc/inittab`. The client's script, with the busybox that it needs for the
//! network, goes on from there.
use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{Client, Initramfs, Kernel, initramfs::BUSYBOX, on_path};
use crate::error::{Error, Result, Tried};

/// The image, if the nested guest is to have its root on a disk.
pub const NESTED_DISK: &str = "/nested/disk";
/// What the root's programs write to it, at the beginning of a block, once it is the root.
pub const ROOT_WITNESS: &[u8] = b"written by the root's own programs";

/// Where `cargo xtask setup` unpacks Debian's packages.
const USERLAND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/kernels/userland");
const STAGE: &str = include_str!("root_stage.sh");
const INITTAB: &str = include_str!("root_inittab");
const BOOT: &str = include_str!("root_boot.sh");
/// Those of the disk; a kernel that has one built in has no module of it.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "ext4"];
/// Bytes of the image: what the client downloads, twice, is there too, and what it sends back.
const IMAGE_BYTES: u64 = 96 << 20;

/// Returns the folder with the files of Debian's packages.
///
/// # Errors
/// They were not fetched.
pub fn debian_userland() -> Result<PathBuf> {
    let userland = PathBuf::from(USERLAND);
    match userland.is_dir() {
        true => Ok(userland),
        false => Err(Error::Missing(format!(
            "there are no packages of Debian's at {USERLAND}: `cargo xtask setup` fetches them where there is \
             apt"
        ))),
    }
}

/// Makes the initramfs that loads the disk's modules and goes on there.
///
/// # Errors
/// There is no busybox here, or a module can't be read.
pub fn root_initramfs(kernel: &Kernel) -> Result<Vec<u8>> {
    let mut initramfs = Initramfs::with_busybox(STAGE)?;
    initramfs.modules(kernel, &MODULES)?;
    Ok(initramfs.finish())
}

/// Makes the disk: an ext4 file system, without partitions, with the Debian and all of the client's files.
///
/// # Errors
/// There is no Debian, `mkfs.ext4` or busybox here, or a file can't be written.
pub fn root_disk(client: &Client, kernel: &Kernel) -> Result<Vec<u8>> {
    let (mkfs, userland) = (on_path("mkfs.ext4")?, debian_userland()?);
    let scratch = tempfile::tempdir().tried("make a folder for the root")?;
    let root = scratch.path().join("root");
    copy_userland(&userland, &root)?;
    unpack(&client.initramfs(kernel)?, &root)?;
    fs::rename(root.join("init"), root.join("init.client")).tried("rename the client's init")?;
    fs::write(root.join("etc/inittab"), INITTAB).tried("configure Debian's init")?;
    let boot = root.join("boot.sh");
    fs::write(&boot, BOOT).tried("write what it runs")?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&boot, mode).tried("make that a program")?;
    let image = scratch.path().join("image");
    let file = fs::File::create(&image).tried("make the image")?;
    file.set_len(IMAGE_BYTES).tried("make the image")?;
    let mut command = Command::new(mkfs);
    command.args(["-q", "-d"]).arg(&root).arg(&image);
    ended_well(command.stdin(Stdio::null()).output(), "mkfs.ext4")?;
    fs::read(&image).tried("read the image")
}

/// Copies the Debian. Newer ones have their programs below `/usr` alone, and links to there, which their
/// installer makes.
fn copy_userland(userland: &Path, root: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.arg("-a").arg(userland).arg(root).stdin(Stdio::null());
    ended_well(copy.output(), "cp")?;
    for folder in ["bin", "sbin", "lib", "lib64"] {
        let (link, target) = (root.join(folder), format!("usr/{folder}"));
        if !link.exists() && root.join(&target).is_dir() {
            std::os::unix::fs::symlink(target, link).tried("link to a folder of /usr")?;
        }
    }
    Ok(())
}

fn unpack(archive: &[u8], to: &Path) -> Result<()> {
    let mut cpio = Command::new(BUSYBOX);
    cpio.args(["cpio", "-idm"]).current_dir(to);
    cpio.stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut running = cpio.spawn().tried("run busybox's cpio")?;
    if let Some(mut input) = running.stdin.take() {
        input.write_all(archive).tried("write to cpio")?;
    }
    ended_well(running.wait_with_output(), "cpio")
}

fn ended_well(output: std::io::Result<std::process::Output>, what: &str) -> Result<()> {
    let output = output.tried(format!("run {what}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(Error::unexpected(format!(
            "{what} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ))),
    }
}
