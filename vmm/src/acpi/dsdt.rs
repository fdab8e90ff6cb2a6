//! The differentiated system description table (DSDT), in AML. It describes the PCI root and its
//! windows, the devices that are not on PCI, and the `_S5` sleep state.
//!
//! One of the devices is the VM's generation id (Microsoft, "Virtual Machine Generation ID"): the
//! guest's kernel mixes it into its random numbers at its start, and again when it is told that the
//! id is another. A machine of the hardware-reduced kind tells events by interrupts of its own, which
//! the generic event device lists (ACPI 6.5, 5.6.9).
use acpi_tables::{
    Aml,
    aml::{
        AddressSpace, AddressSpaceCacheable, Arg, Device, EISAName, Equal, IO, If, Interrupt,
        Memory32Fixed, Method, Name, Notify, ONE, Package, Path, ResourceTemplate, Scope, ZERO,
    },
    sdt::Sdt,
};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes_of};
use crate::layout::{
    self, GENERATION_ID, GENERATION_IRQ, SERIAL_IRQ, SLEEP_TYPE_S5, Window, ports,
};

/// Length of an ACPI table's header, bytes.
const HEADER: u32 = 36;
/// Name of the generation id's device.
const GENERATION_DEVICE: &str = "VGEN";
/// Table revision. From revision 2 on, AML integers have 64 bits.
const REVISION: u8 = 2;

pub(super) fn table(mmio64: Option<Window>) -> Sdt {
    let mut table = Sdt::new(
        *b"DSDT",
        HEADER,
        REVISION,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    for object in [system_bus(mmio64), power_off()] {
        table.append_slice(&object);
    }
    table
}

/// Returns the scope `\_SB`, which holds all devices.
fn system_bus(mmio64: Option<Window>) -> Vec<u8> {
    let devices = [
        pci_root(mmio64),
        motherboard(),
        serial(),
        generation_id(),
        events(),
    ];
    Scope::raw("_SB_".into(), devices.concat())
}

/// Returns `\_S5`, which gives the sleep type for power-off.
fn power_off() -> Vec<u8> {
    bytes_of(&Name::new(
        "_S5_".into(),
        &Package::new(vec![&SLEEP_TYPE_S5, &ZERO]),
    ))
}

fn pci_root(mmio64: Option<Window>) -> Vec<u8> {
    let last_bus = u16::from(layout::LAST_BUS);
    let buses = AddressSpace::new_bus_number(0, last_bus);
    let config = IO::new(ports::PCI_ADDRESS, ports::PCI_ADDRESS, 1, 8);
    let ports_below = AddressSpace::new_io(0, ports::PCI_ADDRESS - 1, None);
    let ports_above = AddressSpace::new_io(0xD00u16, 0xFFFF, None);
    let window32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        layout::MMIO32.start as u32,
        (layout::MMIO32.end() - 1) as u32,
        None,
    );
    let window64 = mmio64.map(|window| {
        let last = window.end() - 1;
        AddressSpace::new_memory(
            AddressSpaceCacheable::NotCacheable,
            true,
            window.start,
            last,
            None,
        )
    });
    let mut resources: Vec<&dyn Aml> = vec![&buses, &config, &ports_below, &ports_above, &window32];
    if let Some(window64) = &window64 {
        resources.push(window64);
    }
    bytes_of(&Device::new(
        "PCI0".into(),
        vec![
            // PCI Express root bridge that also accepts accesses by the ports CF8 and CFC.
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_SEG".into(), &ZERO),
            &Name::new("_BBN".into(), &ZERO),
            &Name::new("_UID".into(), &ZERO),
            // DMA is cache-coherent. Linux evaluates _CCA on other machines than PCs only.
            &Name::new("_CCA".into(), &ONE),
            &Name::new("_CRS".into(), &ResourceTemplate::new(resources)),
        ],
    ))
}

/// Returns the device that reserves ECAM (PCI Firmware specification 3.2, 4.1.2), the sleep
/// registers and the PM timer.
fn motherboard() -> Vec<u8> {
    let ecam = Memory32Fixed::new(true, layout::ECAM.start as u32, layout::ECAM.size as u32);
    let sleep = IO::new(ports::SLEEP_CONTROL, ports::SLEEP_CONTROL, 1, 2);
    let timer = IO::new(ports::PM_TIMER, ports::PM_TIMER, 1, 4);
    bytes_of(&Device::new(
        "MBRD".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&ecam, &sleep, &timer]),
            ),
        ],
    ))
}

fn serial() -> Vec<u8> {
    let registers = IO::new(ports::SERIAL, ports::SERIAL, 1, 8);
    legacy_device("COM1", "PNP0501", &[&registers], SERIAL_IRQ)
}

/// Returns the generation id's device: `ADDR` has the halves of the id's address.
fn generation_id() -> Vec<u8> {
    let address = [
        GENERATION_ID.start as u32,
        (GENERATION_ID.start >> 32) as u32,
    ];
    bytes_of(&Device::new(
        Path::new(GENERATION_DEVICE),
        vec![
            &Name::new("_HID".into(), &"SLIP0001"),
            &Name::new("_CID".into(), &"VM_Gen_Counter"),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Name::new("ADDR".into(), &Package::new(vec![&address[0], &address[1]])),
        ],
    ))
}

/// Returns the generic event device, which has the generation id's driver told of its interrupt.
fn events() -> Vec<u8> {
    let interrupt = Interrupt::new(true, true, false, false, GENERATION_IRQ);
    let device = Path::new(&format!("\\_SB_.{GENERATION_DEVICE}"));
    let changed = Notify::new(&device, &0x80u8);
    let is_it = Equal::new(&Arg(0), &GENERATION_IRQ);
    bytes_of(&Device::new(
        "EVNT".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&interrupt])),
            &Method::new(
                "_EVT".into(),
                1,
                true,
                vec![&If::new(&is_it, vec![&changed])],
            ),
        ],
    ))
}

/// Returns an ISA device with the given ports and one edge-triggered, active-high interrupt.
fn legacy_device(name: &str, id: &str, registers: &[&dyn Aml], gsi: u32) -> Vec<u8> {
    let interrupt = Interrupt::new(true, true, false, false, gsi);
    let mut resources = registers.to_vec();
    resources.push(&interrupt);
    bytes_of(&Device::new(
        Path::new(name),
        vec![
            &Name::new("_HID".into(), &EISAName::new(id)),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(resources)),
        ],
    ))
}
