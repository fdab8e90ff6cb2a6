//! The plot: a panel per metric; per contender a bar for the median, a whisker from the lowest to
//! the highest round and a dot per round; a line at the reference's median.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{
    conditions::Conditions,
    report::number,
    results::{Row, Table},
};

const COLUMNS: usize = 2;
const PANEL_WIDTH: u32 = 620;
const HEADER: u32 = 84;
const PANEL_HEADER: i32 = 46;
const ROW_HEIGHT: i32 = 26;
const BAR_HEIGHT: i32 = 16;
/// Start and maximum end of the bars in a panel, pixels.
const BAR_LEFT: i32 = 156;
const BAR_RIGHT: i32 = 440;
const FONT: &str = "DejaVu Sans, Helvetica, Arial, sans-serif";

const INK: RGBColor = RGBColor(0x1f, 0x29, 0x33);
const FAINT: RGBColor = RGBColor(0x6b, 0x77, 0x85);
const GRID: RGBColor = RGBColor(0xe2, 0xe6, 0xea);

/// How a text looks, and where its anchor is.
struct Style {
    size: i32,
    colour: RGBColor,
    align: HPos,
}

impl Style {
    const TITLE: Style = Style::new(22, INK, HPos::Left);
    const METRIC: Style = Style::new(15, INK, HPos::Left);
    const NOTE: Style = Style::new(12, FAINT, HPos::Left);
    const SMALL: Style = Style::new(11, FAINT, HPos::Left);
    const TICK: Style = Style::new(10, FAINT, HPos::Center);
    const VALUE: Style = Style::new(12, INK, HPos::Right);
    const FAINT_VALUE: Style = Style::new(12, FAINT, HPos::Right);

    const fn new(size: i32, colour: RGBColor, align: HPos) -> Self {
        Self {
            size,
            colour,
            align,
        }
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes the plot of all metrics.
pub(crate) fn draw(conditions: &Conditions, tables: &[Table], path: &Path) -> Result<()> {
    let rows = tables.iter().map(|table| table.rows.len()).max();
    let tables: Vec<&Table> = tables.iter().filter(|table| has_data(table)).collect();
    let panel_height = PANEL_HEADER as u32 + 16 + rows.unwrap_or(0) as u32 * ROW_HEIGHT as u32;
    let lines = tables.len().div_ceil(COLUMNS).max(1) as u32;
    let size = (
        PANEL_WIDTH * COLUMNS as u32 + 20,
        HEADER + lines * panel_height,
    );
    let root = SVGBackend::new(path, size).into_drawing_area();
    let drawn = (|| {
        root.fill(&WHITE).map_err(wrong)?;
        header(&root, conditions)?;
        for (at, table) in tables.iter().enumerate() {
            let (column, line) = ((at % COLUMNS) as u32, (at / COLUMNS) as u32);
            let (left, top) = (10 + column * PANEL_WIDTH, HEADER + line * panel_height);
            let area = root
                .clone()
                .shrink((left, top), (PANEL_WIDTH, panel_height));
            panel(&area, table)?;
        }
        Ok(())
    })();
    root.present().map_err(wrong)?;
    drawn
}

fn has_data(table: &Table) -> bool {
    table.rows.iter().any(|row| row.summary.is_some())
}

fn header(root: &Area, c: &Conditions) -> Result<()> {
    text(root, "slipgate and its peers", (20, 16), Style::TITLE)?;
    let machine = format!(
        "Linux {} · {} × {} · MTU {} · {} UTC · commit {}",
        c.kernel, c.cpus, c.cpu, c.mtu, c.date, c.commit
    );
    text(root, &machine, (20, 44), Style::NOTE)?;
    let key = "bar: median · line: least to most round · dot: a round · at the right: ratio to \
               the blue one, median of the rounds' ratios";
    text(root, key, (20, 62), Style::NOTE)
}

fn panel(area: &Area, table: &Table) -> Result<()> {
    let unit = table.metric.unit;
    let sense = if unit.more_is_better() {
        "more is better"
    } else {
        "less is better"
    };
    text(area, table.metric.name, (10, 10), Style::METRIC)?;
    let legend = format!("{}, {sense}", unit.symbol());
    text(area, &legend, (BAR_RIGHT + 160, 12), Style::FAINT_VALUE)?;
    let scale = Scale::of(table);
    for tick in scale.ticks() {
        let (x, bottom) = (
            scale.x(tick),
            PANEL_HEADER + table.rows.len() as i32 * ROW_HEIGHT,
        );
        line(area, (x, PANEL_HEADER - 4), (x, bottom), GRID, 1)?;
        let at = (x, PANEL_HEADER - 18);
        text(area, &tick_label(tick), at, Style::TICK)?;
    }
    if let Some(reference) = table.row(table.reference).and_then(|row| row.summary) {
        let x = scale.x(reference.median);
        let bottom = PANEL_HEADER + table.rows.len() as i32 * ROW_HEIGHT - 6;
        line(
            area,
            (x, PANEL_HEADER - 4),
            (x, bottom),
            colour(table.reference),
            1,
        )?;
    }
    for (at, row) in table.rows.iter().enumerate() {
        let top = PANEL_HEADER + at as i32 * ROW_HEIGHT;
        bar(area, row, &scale, top)?;
    }
    Ok(())
}

fn bar(area: &Area, row: &Row, scale: &Scale, top: i32) -> Result<()> {
    let middle = top + BAR_HEIGHT / 2;
    let label = (BAR_LEFT - 8, top + 2);
    let Some(summary) = row.summary else {
        text(area, row.contender, label, Style::FAINT_VALUE)?;
        return text(area, "not measured", (BAR_LEFT + 4, top + 2), Style::SMALL);
    };
    text(area, row.contender, label, Style::VALUE)?;
    let colour = colour(row.contender);
    let corners = [(BAR_LEFT, top), (scale.x(summary.median), top + BAR_HEIGHT)];
    area.draw(&Rectangle::new(corners, colour.filled()))
        .map_err(wrong)?;
    if summary.median > scale.most {
        // Two gaps say that the bar goes on.
        for x in [BAR_RIGHT - 12, BAR_RIGHT - 6] {
            line(area, (x, top + BAR_HEIGHT), (x + 4, top), WHITE, 2)?;
        }
    }
    let (from, to) = (scale.x(summary.min), scale.x(summary.max));
    line(area, (from, middle), (to, middle), INK, 1)?;
    for x in [from, to] {
        line(area, (x, middle - 4), (x, middle + 4), INK, 1)?;
    }
    for (_, value) in &row.values {
        let dot = Circle::new((scale.x(*value), middle), 2, INK.mix(0.55).filled());
        area.draw(&dot).map_err(wrong)?;
    }
    let value = number(summary.median);
    text(area, &value, (BAR_RIGHT + 80, top + 2), Style::VALUE)?;
    let ratio = row
        .ratio
        .map_or(String::new(), |ratio| format!("{:.2}×", ratio.median));
    text(area, &ratio, (BAR_RIGHT + 160, top + 2), Style::FAINT_VALUE)
}

/// Axis from zero to the largest value. If one value is so large that the others could not be
/// distinguished, it is cut off.
struct Scale {
    most: f64,
}

impl Scale {
    fn of(table: &Table) -> Scale {
        let largest = table.rows.iter().filter_map(|row| Some(row.summary?.max));
        let most = largest.fold(0.0, f64::max);
        let medians = table.rows.iter();
        Scale::new(most, medians.filter_map(|row| Some(row.summary?.median)))
    }

    fn new(most: f64, medians: impl Iterator<Item = f64>) -> Scale {
        let mut medians: Vec<f64> = medians.collect();
        medians.sort_by(f64::total_cmp);
        // What lies above twice the second largest median is cut.
        let second = medians.iter().rev().nth(1).copied().unwrap_or(most);
        let most = if second > 0.0 {
            most.min(second * 2.0)
        } else {
            most
        };
        Scale {
            // An axis of zeros needs a length, too.
            most: if most > 0.0 { most } else { 1.0 },
        }
    }

    fn x(&self, value: f64) -> i32 {
        let share = (value / self.most).clamp(0.0, 1.03);
        BAR_LEFT + (share * f64::from(BAR_RIGHT - BAR_LEFT)) as i32
    }

    /// Returns four or five round numbers for the ticks.
    fn ticks(&self) -> Vec<f64> {
        let rough = self.most / 4.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .map(|factor| factor * power)
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(rough);
        (0..)
            .map(|count| f64::from(count) * step)
            .take_while(|tick| *tick <= self.most)
            .collect()
    }
}

fn tick_label(tick: f64) -> String {
    match tick {
        tick if tick == tick.trunc() => format!("{tick:.0}"),
        tick => format!("{tick}"),
    }
}

/// Returns a contender's colour: slipgate's stands out; kernel, other eBPF and userspace NATs each
/// have a family.
fn colour(contender: &str) -> RGBColor {
    match contender {
        name if ["slipgate", "qemu-socket", "qemu-vhost-user"]
            .iter()
            .any(|ours| name.starts_with(ours)) =>
        {
            RGBColor(0xe0, 0x7a, 0x1f)
        }
        "nftables" | "nftables-hop" | "qemu-tap" | "qemu-tap ×2" | "qemu" => {
            RGBColor(0x3b, 0x6f, 0xa5)
        }
        "forwarding" => RGBColor(0xa9, 0xc1, 0xd9),
        "einat" => RGBColor(0x7b, 0x5e, 0xa7),
        name if name.starts_with("pasta") || name.starts_with("qemu-passt") => {
            RGBColor(0x5f, 0x9e, 0x6e)
        }
        _ => RGBColor(0x9c, 0xc8, 0xa5),
    }
}

fn text(area: &Area, what: &str, at: (i32, i32), style: Style) -> Result<()> {
    let font = (FONT, style.size).into_font().color(&style.colour);
    let style = font.pos(Pos::new(style.align, VPos::Top));
    area.draw(&Text::new(what.to_owned(), at, style))
        .map_err(wrong)
}

fn line(area: &Area, from: (i32, i32), to: (i32, i32), colour: RGBColor, width: u32) -> Result<()> {
    let path = PathElement::new([from, to], colour.stroke_width(width));
    area.draw(&path).map_err(wrong)
}

fn wrong(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}

#[cfg(test)]
#[path = "plot_test.rs"]
mod tests;
