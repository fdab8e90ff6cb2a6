//! The fixed description table: sleep registers, reset register, what of a PC is there.
use acpi_tables::{
    fadt::{FADT, FADTBuilder, Flags, PmProfile},
    gas::{AccessSize, AddressSpace, GAS},
};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::{I8042_RESET, ports};

/// IAPC_BOOT_ARCH (ACPI 6.5, table 5.10): VGA is not there, nor a CMOS clock with alarm and
/// interrupt. LEGACY devices (bit 0) would have Linux look for those that no table names; with 8042
/// (bit 1) it looks for a keyboard, for seconds, where there is only the reset command.
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
    // Hardware-reduced machines need none, but Linux uses one where it is.
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
