//! Random reads from a disk, by the guest under QEMU. `slipgate-bench` measures them, beside those under
//! `slipgate run`.
use std::{fs, os::unix::fs::FileExt as _};

use slipgate_testbed::builtin_guest::{Device, disk_image};

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
        let command = qemu.command_with(&[Device::Disk(disk.clone(), "threads")]);
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
