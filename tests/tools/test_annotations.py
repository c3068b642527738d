# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
import rasterio
from rasterio.warp import transform_geom
from shapely.geometry import Polygon, box, mapping

from .rasters import CRS, TRANSFORM, listing, read, write_tiff

pytestmark = pytest.mark.filterwarnings(
    'ignore::rasterio.errors.NotGeoreferencedWarning'
)

ANNOTATIONS = 'dataset_converters/annotations.py'

# Rows and columns of the raster that annotations are drawn on.
HEIGHT, WIDTH = 500, 70
FIELD, HOUSE = box(5.2, 10, 60, 450), box(20, 100.6, 30, 120)
RIVER = Polygon([(0, 0), (70, 400), (70, 500), (0, 30)])


def expected():
    """The same areas by their formulas, at the centres of pixels."""
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    out = np.full((HEIGHT, WIDTH), 255, np.uint8)
    out[(x > 5.2) & (x < 60) & (y > 10) & (y < 450)] = 0
    out[(y > x * 400 / 70) & (y < 30 + x * 470 / 70)] = 1
    out[(x > 20) & (x < 30) & (y > 100.6) & (y < 120)] = 2
    return out


def feature(geometry, name, key='class'):
    return {
        'type': 'Feature',
        'geometry': mapping(geometry) if geometry else None,
        'properties': {key: name},
    }


def on_earth(geometry):
    """From columns and rows to the coordinates of the raster."""
    return Polygon(
        [
            (364000 + col / 2, 5810000 - row / 2)
            for col, row in geometry.exterior.coords
        ]
    )


def write_json(path, features, crs=None):
    content = {'type': 'FeatureCollection', 'features': features}
    if crs is not None:
        content['crs'] = {'type': 'name', 'properties': {'name': crs}}
    path.write_text(json.dumps(content))
    return path


class TestAnnotations:
    CLASSES = ('--classes', 'field,river,house')
    NAMED = ((HOUSE, 'house'), (FIELD, 'field'), (RIVER, 'river'))

    @pytest.fixture
    def raster(self, tmp_path):
        path = tmp_path / 'image.tif'
        write_tiff(path, np.zeros((HEIGHT, WIDTH, 3), np.uint8))
        return path

    @pytest.fixture(autouse=True)
    def few_rows(self, monkeypatch):
        """So that areas lie in many strips."""
        monkeypatch.setattr(
            'infsa_seg.apis.converters._STRIP_PIXELS', 64 * WIDTH
        )

    def located(self, tmp_path):
        features = [feature(on_earth(g), name) for g, name in self.NAMED]
        return write_json(tmp_path / 'a.geojson', features, CRS)

    def test_smaller_areas_are_on_top(self, tool, raster, tmp_path):
        out = tmp_path / 'mask.tif'
        outcome = tool(
            ANNOTATIONS, raster, self.located(tmp_path), out, *self.CLASSES
        )
        assert outcome.status == 0, outcome.err
        assert outcome.err == '' and outcome.out == f'{out}\n'
        indices, file = read(out)
        np.testing.assert_array_equal(indices, expected())
        assert file['transform'] == TRANSFORM
        assert file['crs'] == rasterio.crs.CRS.from_string(CRS)
        names = json.loads(file['CLASS_NAMES'])
        assert names == ['field', 'river', 'house']

    def test_background_is_a_class(self, tool, raster, tmp_path):
        out = tmp_path / 'mask.tif'
        outcome = tool(
            *(ANNOTATIONS, raster, self.located(tmp_path), out),
            *('--classes', 'none,field,river,house', '--background', 'none'),
        )
        assert outcome.status == 0, outcome.err
        np.testing.assert_array_equal(read(out)[0], expected() + np.uint8(1))

    def test_other_coordinates(self, tool, raster, tmp_path):
        """Longitude and latitude, as GeoJSON has them unless it says else."""
        features = [feature(on_earth(g), name) for g, name in self.NAMED]
        for item in features:
            item['geometry'] = transform_geom(
                CRS, 'EPSG:4326', item['geometry']
            )
        annotations = write_json(tmp_path / 'a.geojson', features)
        out = tmp_path / 'mask.tif'
        outcome = tool(ANNOTATIONS, raster, annotations, out, *self.CLASSES)
        assert outcome.status == 0, outcome.err
        # Not all: what was straight is now a little bent.
        assert (read(out)[0] == expected()).mean() > 0.999

    def test_a_geopackage(self, tool, raster, tmp_path):
        import pyogrio.raw
        import shapely

        path = tmp_path / 'a.gpkg'
        geometries = [on_earth(geometry) for geometry, _ in self.NAMED]
        pyogrio.raw.write(
            path,
            shapely.to_wkb(np.array(geometries)),
            [np.array([name for _, name in self.NAMED], object)],
            ['kind'],
            geometry_type='Polygon',
            crs=CRS,
            layer='drawn',
        )
        out = tmp_path / 'mask.tif'
        options = (*self.CLASSES, '--property', 'kind', '--layer', 'drawn')
        outcome = tool(ANNOTATIONS, raster, path, out, *options)
        assert outcome.status == 0, outcome.err
        np.testing.assert_array_equal(read(out)[0], expected())
        outcome = tool(ANNOTATIONS, raster, path, out, *self.CLASSES)
        assert outcome.status == 1
        assert "has the property 'class'; choose one of kind" in outcome.err

    @pytest.mark.parametrize('bare', [False, True])
    def test_qupath(self, tool, tmp_path, bare):
        """In pixels, with a class within a property, perhaps a bare list."""
        raster = tmp_path / 'slide.tif'
        write_tiff(raster, np.zeros((HEIGHT, WIDTH, 3), np.uint8), False)
        features = [
            feature(g, {'name': name, 'color': [1, 2, 3]}, 'classification')
            for g, name in self.NAMED
        ]
        for item in features:
            item['properties']['objectType'] = 'annotation'
        annotations = write_json(tmp_path / 'a.geojson', features)
        if bare:
            annotations.write_text(json.dumps(features))
        out = tmp_path / 'mask.tif'
        outcome = tool(ANNOTATIONS, raster, annotations, out, *self.CLASSES)
        assert outcome.status == 0, outcome.err
        np.testing.assert_array_equal(read(out)[0], expected())

    def test_pixels_on_request(self, tool, raster, tmp_path):
        features = [feature(geometry, name) for geometry, name in self.NAMED]
        annotations = write_json(tmp_path / 'a.geojson', features)
        out = tmp_path / 'mask.tif'
        arguments = (ANNOTATIONS, raster, annotations, out, *self.CLASSES)
        assert tool(*arguments, '--pixels').status == 0
        np.testing.assert_array_equal(read(out)[0], expected())

    def test_what_is_left_out_is_said(self, tool, raster, tmp_path):
        features = [
            feature(FIELD, 'field'),
            feature(box(100, 0, 120, 50), 'house'),
            feature(box(5, 5, 6, 6).centroid, 'house'),
            feature(RIVER, 'road'),
            feature(RIVER, None),
            feature(None, 'house'),
        ]
        annotations = write_json(tmp_path / 'a.geojson', features)
        out = tmp_path / 'mask.tif'
        arguments = (
            *(ANNOTATIONS, raster, annotations, out),
            *(*self.CLASSES, '--pixels'),
        )
        outcome = tool(*arguments)
        assert outcome.status == 1
        message = 'has areas of road (1), no class (1); add them to --classes'
        assert message in outcome.err
        assert not out.exists()
        outcome = tool(*arguments, '--leave-others')
        assert outcome.status == 0
        lines = outcome.err.splitlines()
        assert len(lines) == 3
        for line, text in zip(
            lines,
            [
                '1 of 5 features are points, lines or empty, and are left',
                'areas of road (1), no class (1) are left out',
                f'1 of 2 areas lie outside {raster}',
            ],
            strict=True,
        ):
            assert line.startswith(f'annotations.py: warning: {annotations}: ')
            assert text in line
        indices, _ = read(out)
        y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
        field = (x > 5.2) & (x < 60) & (y > 10) & (y < 450)
        np.testing.assert_array_equal(indices, np.where(field, 0, 255))

    @pytest.mark.parametrize(
        ('content', 'options', 'message'),
        [
            ('{"type": "Feature', [], 'a.geojson: is no GeoJSON of features'),
            ('[1, 2]', [], 'a.geojson: is no GeoJSON of features'),
            ('{"features": []}', [], 'a.geojson: has no features'),
            ('words', [], 'a.geojson: cannot be read as features'),
            (None, ['--property', 'x'], "no feature has the property 'x'"),
            (None, ['--background', 'x'], "'x' is none of --classes"),
            (None, ['--pixels'], 'all of its areas lie outside'),
        ],
    )
    def test_errors_are_one_line(
        self, tool, raster, tmp_path, content, options, message
    ):
        annotations = self.located(tmp_path)
        if content is not None:
            annotations.write_text(content)
        out = tmp_path / 'mask.tif'
        outcome = tool(
            ANNOTATIONS, raster, annotations, out, *self.CLASSES, *options
        )
        assert outcome.status == 1
        (line,) = outcome.err.splitlines()
        assert message in line
        assert listing(tmp_path) == ['a.geojson', 'image.tif']

    def test_a_raster_without_coordinates(self, tool, raster, tmp_path):
        write_tiff(raster, np.zeros((HEIGHT, WIDTH), np.uint8), False)
        out = tmp_path / 'mask.tif'
        outcome = tool(
            ANNOTATIONS, raster, self.located(tmp_path), out, *self.CLASSES
        )
        assert outcome.status == 1
        assert 'image.tif: does not say where on earth it l' in outcome.err

    def test_wrong_classes(self, tool, raster, tmp_path):
        outcome = tool(ANNOTATIONS, raster, 'a', 'b', '--classes', 'a,a')
        assert outcome.status == 2
        assert 'is no list of different classes' in outcome.err

    def test_libraries_that_are_missing_are_named(
        self, tool, raster, tmp_path, monkeypatch
    ):
        monkeypatch.setitem(__import__('sys').modules, 'shapely', None)
        out = tmp_path / 'mask.tif'
        outcome = tool(
            ANNOTATIONS, raster, self.located(tmp_path), out, *self.CLASSES
        )
        assert outcome.status == 1
        assert "needs shapely; run pip install 'infsa_seg[raster]'" in (
            outcome.err
        )
