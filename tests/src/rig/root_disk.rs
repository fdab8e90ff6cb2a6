//! A disk whose ext4 file system is the root of a Linux client, and the initramfs that a kernel needs
//! whose drivers of the disk are modules.
use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use super::{Client, Initramfs, Kernel, initramfs::BUSYBOX, on_path};
use crate::error::{Error, Result, Tried};

/// The image, if the nested guest is to have its root on a disk.
pub const NESTED_DISK: &str = "/nested/disk";
/// What the guest's init writes to it, once it is the root.
pub const ROOT_WITNESS: &[u8] = b"written by the root's own init";

const STAGE: &str = include_str!("root_stage.sh");
const INIT: &str = include_str!("root_init.sh");
/// Those of the disk; a kernel that has one built in has no module of it.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "ext4"];
/// Bytes of the image: what the client downloads, twice, is there too, and what it sends back.
const IMAGE_BYTES: u64 = 64 << 20;

/// Makes the initramfs that loads the disk's modules and goes on there.
///
/// # Errors
/// There is no busybox here, or a module can't be read.
pub fn root_initramfs(kernel: &Kernel) -> Result<Vec<u8>> {
    let mut initramfs = Initramfs::with_busybox(STAGE)?;
    initramfs.modules(kernel, &MODULES)?;
    Ok(initramfs.finish())
}

/// Makes the disk: an ext4 file system, without partitions, with all of the client's files.
///
/// # Errors
/// There is no `mkfs.ext4` or no busybox here, or a file can't be written.
pub fn root_disk(client: &Client, kernel: &Kernel) -> Result<Vec<u8>> {
    let mkfs = on_path("mkfs.ext4")?;
    let scratch = tempfile::tempdir().tried("make a folder for the root")?;
    let root = scratch.path().join("root");
    fs::create_dir(&root).tried("make the root")?;
    unpack(&client.initramfs(kernel)?, &root)?;
    let init = root.join("init");
    fs::rename(&init, root.join("init.client")).tried("rename the client's init")?;
    fs::write(&init, INIT).tried("write the init")?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&init, mode).tried("make the init a program")?;
    let image = scratch.path().join("image");
    let file = fs::File::create(&image).tried("make the image")?;
    file.set_len(IMAGE_BYTES).tried("make the image")?;
    let mut command = Command::new(mkfs);
    command.args(["-q", "-d"]).arg(&root).arg(&image);
    ended_well(command.stdin(Stdio::null()).output(), "mkfs.ext4")?;
    fs::read(&image).tried("read the image")
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
