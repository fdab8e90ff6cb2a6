use std::{cell::RefCell, collections::HashMap};

use super::*;

/// Configuration space of some functions; ones elsewhere.
#[derive(Default)]
struct Space(RefCell<HashMap<(u8, u8), [u32; 64]>>);

impl Space {
    fn add(&self, device: u8, function: u8, registers: &[(u16, u32)]) -> Function {
        let mut all = [0; 64];
        for (offset, value) in registers {
            all[usize::from(offset / 4)] = *value;
        }
        self.0.borrow_mut().insert((device, function), all);
        Function { device, function }
    }
}

impl ConfigSpace for Space {
    fn read(&self, at: Function, offset: u16) -> u32 {
        assert_eq!(offset % 4, 0);
        self.0
            .borrow()
            .get(&(at.device, at.function))
            .map_or(u32::MAX, |all| all[usize::from(offset / 4)])
    }

    fn write(&self, at: Function, offset: u16, value: u32) {
        let mut space = self.0.borrow_mut();
        space.get_mut(&(at.device, at.function)).unwrap()[usize::from(offset / 4)] = value;
    }
}

#[test]
fn every_function_of_the_bus_is_found_and_no_other() {
    let space = Space::default();
    space.add(0, 0, &[(0, 0x0D57_1B36)]);
    space.add(3, 0, &[(0, 0x1041_1AF4), (0x0C, 0x0080_0000)]);
    space.add(3, 5, &[(0, 0x1044_1AF4)]);
    // Not a function: the device has only one.
    space.add(0, 1, &[(0, 0x1111_1111)]);
    space.add(31, 0, &[(0, 0x1050_1AF4)]);
    let found: Vec<_> = functions(&space)
        .map(|at| (at.device, at.function))
        .collect();
    assert_eq!(found, [(0, 0), (3, 0), (3, 5), (31, 0)]);
    assert_eq!(
        id(
            &space,
            Function {
                device: 3,
                function: 0
            }
        ),
        (0x1AF4, 0x1041)
    );
}

#[test]
fn base_addresses_of_either_width() {
    let space = Space::default();
    let bars = [
        (0x10, 0xC000_0001),
        (0x14, 0xFEBF_1000),
        (0x18, 0x0000_400C),
        (0x1C, 0x0000_0038),
        (0x20, 0),
    ];
    let card = space.add(1, 0, &bars);
    let addresses: Vec<_> = (0..8).map(|bar| memory_bar(&space, card, bar)).collect();
    let high = Some(0x38_0000_4000);
    assert_eq!(
        addresses[..3],
        [None, Some(0xFEBF_1000), high],
        "I/O, 32 bits, 64 bits"
    );
    assert_eq!(addresses[4..], [None; 4], "not assigned, not there");
}

#[test]
fn capabilities_in_order_and_never_for_ever() {
    let space = Space::default();
    let list = [
        (4, 1 << 20),
        (0x34, 0x40),
        (0x40, 0x5011),
        (0x50, 0x6009),
        (0x60, 0x0009),
    ];
    let card = space.add(1, 0, &list);
    assert_eq!(
        capabilities(&space, card).collect::<Vec<_>>(),
        [(0x11, 0x40), (9, 0x50), (9, 0x60)]
    );

    let circle = space.add(2, 0, &[(4, 1 << 20), (0x34, 0x40), (0x40, 0x4011)]);
    assert_eq!(capabilities(&space, circle).count(), 48);
    let header = space.add(3, 0, &[(4, 1 << 20), (0x34, 0x10)]);
    assert_eq!(
        capabilities(&space, header).count(),
        0,
        "points into the header"
    );
    let none = space.add(4, 0, &[(0x34, 0x40), (0x40, 0x0011)]);
    assert_eq!(
        capabilities(&space, none).count(),
        0,
        "the status says that there is no list"
    );
}

#[test]
fn enabling_leaves_the_status_alone() {
    let space = Space::default();
    let card = space.add(1, 0, &[(4, 0xF910_0001)]);
    enable(&space, card);
    assert_eq!(space.read(card, 4), 0x0407);
}
