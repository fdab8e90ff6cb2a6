use super::*;

/// The device's side, as far as these tests need it.
struct Device {
    addresses: [u64; 3],
    size: u16,
    seen: u16,
    used: u16,
}

impl Device {
    fn new(ring: &Ring) -> Self {
        Device {
            addresses: ring.addresses(),
            size: ring.size(),
            seen: 0,
            used: 0,
        }
    }

    fn half(&self, area: usize, offset: usize) -> &AtomicU16 {
        half_at(self.addresses[area] + offset as u64)
    }

    fn next(&mut self) -> Option<u16> {
        if self.half(1, 2).load(Ordering::Acquire) == self.seen {
            return None;
        }
        let head = self
            .half(1, 4 + 2 * usize::from(self.seen % self.size))
            .load(Ordering::Relaxed);
        self.seen = self.seen.wrapping_add(1);
        Some(head)
    }

    fn give_back(&mut self, head: u32, written: u32) {
        let entry = self.addresses[2] + 4 + 8 * u64::from(self.used % self.size);
        for (at, value) in [(entry, head), (entry + 4, written)] {
            half_at(at).store(value as u16, Ordering::Relaxed);
            half_at(at + 2).store((value >> 16) as u16, Ordering::Relaxed);
        }
        self.used = self.used.wrapping_add(1);
        self.half(2, 2).store(self.used, Ordering::Release);
    }

    /// Returns address, length, flags and next of a descriptor.
    fn descriptor(&self, table: u64, index: u16) -> (u64, u32, u16, u16) {
        let at = table + 16 * u64::from(index);
        let halves: Vec<u64> = (0..8)
            .map(|half| half_at(at + 2 * half).load(Ordering::Relaxed).into())
            .collect();
        let wide = |from: usize, count: usize| {
            (0..count).fold(0, |sum, at| sum | halves[from + at] << (16 * at))
        };
        (
            wide(0, 4),
            wide(4, 2) as u32,
            halves[6] as u16,
            halves[7] as u16,
        )
    }
}

fn half_at(address: u64) -> &'static AtomicU16 {
    // SAFETY: inside the ring's memory, which outlives the test's device.
    unsafe { AtomicU16::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

fn piece(address: u64, device_writes: bool) -> Segment {
    Segment {
        address,
        length: address as u32 / 16,
        device_writes,
    }
}

#[test]
fn a_chain_is_linked_and_freed_whole() {
    let mut ring = Ring::new(8, 0);
    let mut device = Device::new(&ring);
    let segments = [
        piece(0x1000, false),
        piece(0x2000, false),
        piece(0x3000, true),
    ];
    let head = ring.offer(&segments).unwrap();
    assert_eq!((ring.room(), device.next()), (5, None), "not published yet");
    ring.publish();
    assert_eq!(device.next(), Some(head));
    let mut index = head;
    for (at, segment) in segments.iter().enumerate() {
        let (address, length, flags, next) = device.descriptor(device.addresses[0], index);
        assert_eq!((address, length), (segment.address, segment.length));
        assert_eq!(flags, [NEXT, NEXT, WRITE][at]);
        index = next;
    }
    assert_eq!(ring.take_used(), None);
    device.give_back(head.into(), 77);
    assert_eq!(ring.take_used(), Some(Used { head, written: 77 }));
    ring.release(head);
    assert_eq!(ring.room(), 8);
}

#[test]
fn what_has_no_room_is_refused_whole() {
    let mut ring = Ring::new(4, 0);
    assert!(ring.offer(&[]).is_none());
    assert!(ring.offer(&[piece(16, false); 5]).is_none());
    assert!(ring.offer(&[piece(16, false); 3]).is_some());
    assert!(ring.offer(&[piece(16, false); 2]).is_none());
    assert_eq!(ring.room(), 1);
    assert!(ring.offer_one(piece(16, false)).is_some());
    assert!(ring.offer_one(piece(16, false)).is_none());
}

#[test]
fn an_indirect_buffer_takes_one_descriptor() {
    assert!(
        Ring::new(4, 0)
            .offer_indirect(&[piece(16, false)])
            .is_none(),
        "not negotiated"
    );
    let mut ring = Ring::new(4, feature::INDIRECT_DESC);
    let mut device = Device::new(&ring);
    assert!(
        ring.offer_indirect(&[piece(16, false); TABLE + 1])
            .is_none()
    );
    let head = ring
        .offer_indirect(&[piece(0x1000, false), piece(0x2000, true)])
        .unwrap();
    ring.publish();
    assert_eq!((device.next(), ring.room()), (Some(head), 3));
    let (table, length, flags, _) = device.descriptor(device.addresses[0], head);
    assert_eq!((length, flags), (32, INDIRECT));
    assert_eq!(device.descriptor(table, 0), (0x1000, 0x100, NEXT, 1));
    assert_eq!(device.descriptor(table, 1), (0x2000, 0x200, WRITE, 0));
    device.give_back(head.into(), 0);
    let used = ring.take_used().unwrap();
    ring.release(used.head);
    assert_eq!(ring.room(), 4);
}

#[test]
fn indices_wrap() {
    let mut ring = Ring::new(4, 0);
    let mut device = Device::new(&ring);
    for round in 0..140_000_u32 {
        let head = ring.offer_one(piece(u64::from(round), true)).unwrap();
        ring.publish();
        assert_eq!(device.next(), Some(head));
        device.give_back(head.into(), round);
        assert_eq!(
            ring.take_used(),
            Some(Used {
                head,
                written: round
            })
        );
        ring.release(head);
    }
}

#[test]
fn heads_that_the_device_never_had_are_passed_over() {
    let mut ring = Ring::new(4, 0);
    let mut device = Device::new(&ring);
    let head = ring.offer_one(piece(16, true)).unwrap();
    ring.publish();
    for wrong in [4, 0xFFFF, 0x1_0000, u32::MAX, (u32::from(head) + 1) % 4] {
        device.give_back(wrong, 1);
    }
    device.give_back(head.into(), 2);
    assert_eq!(ring.take_used(), Some(Used { head, written: 2 }));
    ring.release(head);
    device.give_back(head.into(), 3);
    assert_eq!(ring.take_used(), None, "returned twice");
    assert_eq!(ring.room(), 4);
}

#[test]
fn without_event_idx_flags_say_who_wants_to_be_told() {
    let mut ring = Ring::new(4, 0);
    let mut device = Device::new(&ring);
    assert!(!ring.wants_kick(), "nothing is new");
    let head = ring.offer_one(piece(16, true)).unwrap();
    assert!(ring.wants_kick());
    assert!(!ring.wants_kick(), "told already");
    device.half(2, 0).store(NO_NOTIFY, Ordering::Relaxed);
    ring.offer_one(piece(16, true));
    assert!(!ring.wants_kick());

    ring.disarm();
    assert_eq!(device.half(1, 0).load(Ordering::Relaxed), NO_INTERRUPT);
    assert!(ring.arm());
    assert_eq!(device.half(1, 0).load(Ordering::Relaxed), 0);
    device.give_back(head.into(), 0);
    assert!(!ring.arm(), "there is one");
}

#[test]
fn with_event_idx_each_says_at_which_index() {
    let mut ring = Ring::new(4, feature::EVENT_IDX);
    let mut device = Device::new(&ring);
    // The device wants a notification at index 2, that is, of the third buffer.
    device.half(2, 4 + 8 * 4).store(2, Ordering::Relaxed);
    for wanted in [false, false, true, false] {
        ring.offer_one(piece(16, true)).unwrap();
        assert_eq!(ring.wants_kick(), wanted);
    }
    let event = |device: &Device| device.half(1, 4 + 2 * 4).load(Ordering::Relaxed);
    assert!(ring.arm());
    assert_eq!(event(&device), 0);
    for _ in 0..2 {
        let head = device.next().unwrap();
        device.give_back(head.into(), 0);
        ring.take_used().unwrap();
    }
    assert!(ring.arm_after(1));
    assert_eq!(event(&device), 3);
    ring.disarm();
    assert_eq!(event(&device), 1);
}

#[test]
fn an_index_crosses_an_event_once() {
    assert!(crosses(5, 5, 6) && crosses(5, 0, 6) && crosses(0xFFFF, 0xFFFE, 0));
    assert!(!crosses(5, 6, 7) && !crosses(5, 0, 5) && !crosses(5, 5, 5) && !crosses(4, 5, 100));
    // For any event, exactly one of all steps around the circle crosses it.
    for event in [0, 1, 0x7FFF, 0xFFFF] {
        let count = (0..=0xFFFF_u16)
            .step_by(16)
            .filter(|old| crosses(event, *old, old.wrapping_add(16)))
            .count();
        assert_eq!(count, 1);
    }
}
