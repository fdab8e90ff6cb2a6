//! Random reads from a disk and scattered writes to one, by the guest under QEMU. `slipgate-bench` measures
//! them, beside those under `slipgate run`.
use std::{fs, os::unix::fs::FileExt as _};

use slipgate_testbed::builtin_guest::{Device, check_disk_image, disk_image, disk_image_in_memory};

use super::*;

#[test]
fn under_qemu_it_reads_a_disk_at_random_and_notices_a_wrong_byte() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    let (_folder, disk) = disk_image(1 << 20).unwrap();
    let guest = |work: &str| {
        let mut qemu = stand.qemu(Accelerator::Kvm, Network::User, work);
        qemu.boot.cpus = 1;
        let device = Device::Disk {
            image: disk.clone(),
            read_only: true,
            aio: "threads",
        };
        let command = qemu.command_with(&[device]);
        let output = qemu.run_by(command.unwrap()).unwrap();
        (output.is_well(), output.results("disk"))
    };
    // Each of the 256 blocks is among 3,000 reads.
    let thirty_two = "disk 0 random 1048576 3000 x32";
    let (is_well, said) = guest(&format!("disk 0 random 1048576 300; {thirty_two}"));
    assert!(is_well && said.len() == 2, "{said:?}");
    assert_eq!(
        (&said[0]["count"], &said[1]["at_once"]),
        (&300.into(), &32.into())
    );
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.write_at(b"x", 700_001).unwrap();
    let (is_well, said) = guest(thirty_two);
    assert!(!is_well, "{said:?}");
    assert_eq!(said[0]["error"], "byte 700001 is wrong");
    let (_, said) = guest("disk 0 random 1052672 1");
    assert_eq!(said[0]["error"], "the disk has 2048 sectors");
}

#[test]
fn under_qemu_it_scatters_blocks_over_a_disk() {
    const BYTES: usize = 1 << 20;
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    for work in ["5", "64 x32"] {
        let (_folder, image) = disk_image_in_memory(BYTES).unwrap();
        assert!(check_disk_image(&image).is_err(), "nothing is written yet");
        let work = format!("disk 0 scatter {BYTES} {work}");
        let mut qemu = stand.qemu(Accelerator::Kvm, Network::User, &work);
        qemu.boot.cpus = 1;
        let device = Device::Disk {
            image: image.clone(),
            read_only: false,
            aio: "threads",
        };
        let command = qemu.command_with(&[device]).unwrap();
        let output = qemu.run_by(command).unwrap();
        assert!(output.is_well(), "{:?}", output.results("disk"));
        check_disk_image(&image).unwrap();
    }
}
