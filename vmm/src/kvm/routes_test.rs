use super::*;

fn message(data: u32) -> MsiMessage {
    MsiMessage {
        address: 0x1_fee0_1000,
        data,
    }
}

#[test]
fn pins_keep_their_routes_and_unrouted_lines_have_none() {
    let lines = BTreeMap::from([(24, Some(message(0x31))), (25, None)]);
    let entries = entries(&lines);
    let of = |kind: u32| entries.iter().filter(move |e| e.type_ == kind);
    let ioapic_pins = of(KVM_IRQ_ROUTING_IRQCHIP)
        // SAFETY: the entry's type says which member the union holds.
        .filter(|e| unsafe { e.u.irqchip.irqchip } == KVM_IRQCHIP_IOAPIC)
        .count();
    assert_eq!((ioapic_pins, of(KVM_IRQ_ROUTING_IRQCHIP).count()), (24, 40));
    let pin_12 = entries
        .iter()
        // SAFETY: as above.
        .find(|e| e.gsi == 12 && unsafe { e.u.irqchip.irqchip } == KVM_IRQCHIP_PIC_SLAVE)
        .unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { pin_12.u.irqchip.pin }, 4);
    let [msi] = of(KVM_IRQ_ROUTING_MSI).collect::<Vec<_>>()[..] else {
        panic!("one line is routed");
    };
    // SAFETY: as above.
    let route = unsafe { msi.u.msi };
    assert_eq!(
        (msi.gsi, route.address_lo, route.address_hi, route.data),
        (24, 0xfee0_1000, 1, 0x31)
    );
}

#[test]
fn a_freed_line_is_taken_again() {
    let mut lines = BTreeMap::from([(24, None), (25, None), (26, None)]);
    assert_eq!(first_free(&lines), Some(27));
    lines.remove(&25);
    assert_eq!(first_free(&lines), Some(25));
}
