//! The fixed description table: sleep registers, reset register, what of a PC is there.
use acpi_tables::{
    fadt::{FADT, FADTBuilder, Flags, PmProfile},
    gas::{AccessSize, AddressSpace, GAS},
};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::{I8042_RESET, ports};

/// IAPC_BOOT_ARCH (ACPI 6.5, table 5.10): an 8042 is there; VGA and CMOS clock are not. LEGACY
/// devices (bit 0) would have Linux look for those that no table names.
const HAS_8042: u16 = 1 << 1;
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_CLOCK: u16 = 1 << 5;

pub(super) fn table(dsdt: u64) -> FADT {
    let port = |address: u16| {
        GAS::new(
            AddressSpace::SystemIo,
            8,
            0,
            AccessSize::ByteAccess,
            address.into(),
        )
    };
    let mut table = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::Unspecified)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    table.iapc_boot_arch = (HAS_8042 | NO_VGA | NO_CMOS_CLOCK).into();
    table.reset_reg = port(ports::I8042_COMMAND);
    table.reset_value = I8042_RESET;
    table.sleep_control_reg = port(ports::SLEEP_CONTROL);
    table.sleep_status_reg = port(ports::SLEEP_STATUS);
    table.finalize()
}
