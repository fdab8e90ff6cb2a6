//! The fixed ACPI description table (FADT): sleep registers, reset register, PM timer, and flags
//! for the legacy hardware of a PC.
use acpi_tables::{
    fadt::{FADT, FADTBuilder, Flags, PmProfile},
    gas::{AccessSize, AddressSpace, GAS},
};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::{I8042_RESET, ports};

/// Flags of IAPC_BOOT_ARCH (ACPI 6.5, table 5.10): the machine has no VGA, and no CMOS clock with
/// alarm and interrupt. The flag LEGACY_DEVICES (bit 0) stays clear, because it would have Linux
/// look for devices that no table names. The flag 8042 (bit 1) stays clear, because it would have
/// Linux look for a keyboard for seconds, and only the reset command exists.
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
        .flag(Flags::TmrValExt)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    table.iapc_boot_arch = (NO_VGA | NO_CMOS_CLOCK).into();
    table.reset_reg = port(ports::I8042_COMMAND);
    table.reset_value = I8042_RESET;
    // A hardware-reduced machine needs no PM timer, but Linux uses one where it exists.
    table.x_pm_tmr_blk = GAS::new(
        AddressSpace::SystemIo,
        32,
        0,
        AccessSize::DwordAccess,
        ports::PM_TIMER.into(),
    );
    table.sleep_control_reg = port(ports::SLEEP_CONTROL);
    table.sleep_status_reg = port(ports::SLEEP_STATUS);
    table.finalize()
}
