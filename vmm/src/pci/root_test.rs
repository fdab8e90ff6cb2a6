use std::{sync::Arc, thread};

use vm_memory::GuestAddress;

use super::*;
use crate::{
    GuestMemory,
    fake::{Device, Driver, Fabric},
    virtio::transport::VirtioPci,
};

const WINDOWS: Windows = Windows {
    mmio32: 0xc000_0000..0xc100_0000,
    mmio64: 1 << 36..1 << 37,
};

fn function(fabric: &Arc<Fabric>) -> Box<dyn PciDevice> {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
    let (device, _) = Device::new(&[8, 8], 0);
    let function = VirtioPci::new(
        Box::new(device),
        Arc::new(memory),
        fabric.clone(),
        fabric.clone(),
    );
    Box::new(function.unwrap())
}

fn root(functions: u8) -> Root {
    let fabric = Arc::default();
    let mut root = Root::new(WINDOWS);
    for number in 1..=functions {
        assert_eq!(root.add(function(&fabric)), Ok(number));
    }
    root
}

fn ecam<const N: usize>(root: &Root, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    root.ecam_read(offset, &mut bytes);
    bytes
}

fn port<const N: usize>(root: &Root, port: u16) -> [u8; N] {
    let mut bytes = [0; N];
    root.port_read(port, &mut bytes);
    bytes
}

#[test]
fn the_address_register_takes_whole_dwords() {
    let root = root(0);
    root.port_write(0xcf8, &0xffff_ffff_u32.to_le_bytes());
    assert_eq!(port(&root, 0xcf8), 0x80ff_fffc_u32.to_le_bytes());
    root.port_write(0xcfb, &[1]);
    root.port_write(0xcf8, &[0]);
    root.port_write(0xcf8, &[0, 0]);
    root.port_write(0xcfa, &[0, 0]);
    assert_eq!(port(&root, 0xcf8), 0x80ff_fffc_u32.to_le_bytes());
    assert_eq!(port(&root, 0xcf8), [0xff], "a byte of it is another port");
    assert_eq!(port(&root, 0xcfa), [0xff; 2]);
}

#[test]
fn data_ports_and_ecam_see_the_same() {
    let root = root(1);
    for dword in (0..256).step_by(4) {
        root.port_write(0xcf8, &(0x8000_0800_u32 | dword).to_le_bytes());
        let whole: [u8; 4] = port(&root, 0xcfc);
        assert_eq!(whole, ecam(&root, 0x8000 + u64::from(dword)));
        assert_eq!(port(&root, 0xcfd), [whole[1]]);
        assert_eq!(port(&root, 0xcfe), [whole[2], whole[3]]);
        assert_eq!(port(&root, 0xcfd), [whole[1], whole[2]], "a word across");
        assert_eq!(
            port(&root, 0xcfe),
            [whole[2], whole[3], 0xff, 0xff],
            "past the last port"
        );
    }
    // The interrupt line, a scratch byte, through ports and through ECAM.
    root.port_write(0xcf8, &0x8000_083c_u32.to_le_bytes());
    root.port_write(0xcfc, &[7]);
    assert_eq!(ecam(&root, 0x803c), [7]);
    root.ecam_write(0x803b, &[1, 9, 1]);
    assert_eq!(port(&root, 0xcfc), [9, 0]);
    root.port_write(0xcf8, &0x0000_083c_u32.to_le_bytes());
    root.port_write(0xcfc, &[1]);
    assert_eq!(port(&root, 0xcfc), [0xff], "disabled");
    assert_eq!(ecam(&root, 0x803c), [9]);
}

#[test]
fn what_is_not_there_reads_as_ones() {
    let root = root(1);
    for offset in [0x1_0000, 0x9000, 0x8000 + (1 << 20), 1 << 28, u64::MAX - 8] {
        root.ecam_write(offset, &[0; 4]);
        assert_eq!(ecam(&root, offset), [0xff; 4], "{offset:#x}");
    }
    assert_eq!(
        ecam(&root, 0x8ffe),
        [0, 0, 0xff, 0xff],
        "past a function's end"
    );
    for address in [0x8000_0900_u32, 0x8001_0800, 0x8000_1000] {
        root.port_write(0xcf8, &address.to_le_bytes());
        assert_eq!(port(&root, 0xcfc), [0xff; 4], "{address:#x}");
    }
    assert!(!root.mmio_read(0xc000_0000, &mut [0]));
    assert!(!root.mmio_write(u64::MAX, &[0; 8]));
}

#[test]
fn the_host_bridge_is_first() {
    let root = root(0);
    assert_eq!(ecam(&root, 8), [0, 0, 0, 6]);
    assert_eq!(ecam(&root, 0x34), [0], "no capabilities");
    for bar in 0..6 {
        root.ecam_write(0x10 + 4 * bar, &[0xff; 4]);
        assert_eq!(ecam(&root, 0x10 + 4 * bar), [0; 4]);
    }
}

#[test]
fn bars_are_assigned_and_off() {
    let root = root(31);
    let mut taken = Vec::new();
    for number in 1..=31 {
        let base = u64::from(number) << 15;
        assert_eq!(ecam::<2>(&root, base + 4), [0, 0], "nothing is on");
        let driver = Driver::find(&root, number);
        let [low, high] = [driver.bar(0), driver.bar(2)];
        assert!(WINDOWS.mmio32.contains(&low) && WINDOWS.mmio64.contains(&high));
        assert_eq!((low % 0x2000, high % 0x4000), (0, 0));
        taken.extend([low..low + 0x2000, high..high + 0x4000]);
    }
    taken.sort_by_key(|range| range.start);
    assert!(taken.windows(2).all(|two| two[0].end <= two[1].start));
}

#[test]
fn no_more_than_there_is_room_for() {
    let fabric = Arc::default();
    let mut full = root(31);
    assert_eq!(full.add(function(&fabric)), Err(PciError::BusFull));
    let window = 0xc000_0000..0xc000_3000;
    let mut small = Root::new(Windows {
        mmio32: window.clone(),
        ..WINDOWS
    });
    assert_eq!(small.add(function(&fabric)), Ok(1));
    let refused = small.add(function(&fabric));
    assert_eq!(
        refused,
        Err(PciError::NoRoom {
            bar: 0,
            len: 0x2000,
            window
        })
    );
    for mmio64 in [0..0, u64::MAX - 0x100..u64::MAX] {
        let mut low = Root::new(Windows { mmio64, ..WINDOWS });
        assert_eq!(low.add(function(&fabric)), Ok(1));
        let driver = Driver::find(&low, 1);
        assert_eq!((driver.bar(0), driver.bar(2)), (0xc000_0000, 0xc000_4000));
        assert_eq!(driver.status(), 0, "it is decoded");
    }
}

#[test]
fn a_bar_outside_the_windows_is_not_seen() {
    let root = root(1);
    let driver = Driver::find(&root, 1);
    let (home, common) = (driver.bar(2), driver.common);
    assert!(root.mmio_read(common, &mut [0]));
    // RAM, the local APICs, just before the window, outside all windows.
    for place in [0, 0xfee0_0000, (1 << 36) - 0x1000, 1 << 50] {
        driver.config_write(0x18, &u64::to_le_bytes(place));
        assert!(!root.mmio_read(common, &mut [0]));
        assert!(!root.mmio_read(place, &mut [0]));
    }
    driver.config_write(0x18, &home.to_le_bytes());
    assert!(root.mmio_read(common, &mut [0]));
    driver.config_write(4, &[0]);
    assert!(!root.mmio_read(common, &mut [0]));
}

#[test]
fn an_access_has_to_lie_in_the_window() {
    let root = root(1);
    let driver = Driver::find(&root, 1);
    let end = driver.bar(2) + 0x4000;
    assert!(root.mmio_read(end - 4, &mut [0; 4]));
    assert!(!root.mmio_read(end - 4, &mut [0; 8]));
    assert!(!root.mmio_write(driver.bar(2) - 1, &[0; 2]));
}

#[test]
fn the_lowest_device_answers_where_bars_overlap() {
    let root = root(2);
    let [first, second] = [Driver::find(&root, 1), Driver::find(&root, 2)];
    first.add_status(1);
    second.config_write(0x18, &first.bar(2).to_le_bytes());
    assert_eq!(second.read(first.common + 20), [1]);
    first.config_write(4, &[0]);
    assert_eq!(
        second.read(first.common + 20),
        [0],
        "the second's own status"
    );
    first.config_write(4, &[2]);
    assert_eq!(second.read(first.common + 20), [1]);
}

#[test]
fn accesses_while_bars_move() {
    let root = root(2);
    let drivers = [Driver::find(&root, 1), Driver::find(&root, 2)];
    thread::scope(|scope| {
        for (me, other) in [(0, 1), (1, 0)] {
            let [me, other] = [me, other].map(|number| &drivers[number]);
            let root = &root;
            scope.spawn(move || {
                let home = me.bar(2);
                for round in 0..2_000_u64 {
                    me.config_write(0x18, &(home + (round % 3) * 0x4000).to_le_bytes());
                    let mut bytes = [0; 4];
                    root.mmio_read(other.common + round % 0x4000, &mut bytes);
                    root.mmio_write(home + round % 0x3000, &bytes);
                }
                me.config_write(0x18, &home.to_le_bytes());
            });
        }
    });
    for driver in &drivers {
        driver.reset();
    }
}
