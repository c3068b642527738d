# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Files of polygons, to which features are appended."""

from __future__ import annotations

import contextlib
import json
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# So that the same polygons have the same names in QuPath.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, 'infsa_seg')
# An append opens the file and ends a transaction.
_APPENDED = 20_000


class Features(NamedTuple):
    """Polygons to write.

    Attributes:
        shapes: shapely polygons (features,).
        classes: index of the class of each, int64 (features,).
        areas: float64 (features,).
        keys: what tells each from all others of the map: a corner (x, y),
            float64 (features, 2).
    """

    shapes: np.ndarray
    classes: np.ndarray
    areas: np.ndarray
    keys: np.ndarray


class VectorFile(ABC):
    """A file of polygons that is being written."""

    @abstractmethod
    def append(self, features: Features) -> None:
        """Write features after those that it has."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""

    @abstractmethod
    def abort(self) -> None:
        """Let go of the file as it is."""


class GeoJsonFile(VectorFile):
    """A FeatureCollection, one feature per line.

    Args:
        path: The file.
        layer: Name of the whole.
        class_names: Names of the classes.
        area: Name of the property that has the area.
        crs: Coordinate reference system as WKT, or None. It is named in the
            member ``crs``, which the current standard has no more and GIS
            programs read.
        metadata: Kept in a member of this name, if there is any.

    Raises:
        ValueError: The coordinate reference system has no code.
    """

    def __init__(
        self,
        path: Path,
        layer: str,
        class_names: Sequence[str],
        area: str,
        crs: str | None,
        metadata: Mapping[str, str],
    ) -> None:
        head: dict[str, Any] = {'type': 'FeatureCollection', 'name': layer}
        if crs is not None:
            head['crs'] = {
                'type': 'name',
                'properties': {'name': _crs_name(crs)},
            }
        if metadata:
            head['metadata'] = dict(metadata)
        self._names = [_json(name) for name in class_names]
        self._area = _json(area)
        self._file = path.open('w', encoding='utf-8', newline='\n')
        self._separator = '\n'
        self._file.write(_json(head)[:-1] + ', "features": [')

    def append(self, features: Features) -> None:
        import shapely

        shapes = shapely.to_geojson(features.shapes).tolist()
        heads = self._heads(features)
        for head, shape in zip(heads, shapes, strict=True):
            self._file.write(
                f'{self._separator}{{"type": "Feature", {head}, '
                f'"geometry": {shape}}}'
            )
            self._separator = ',\n'

    def close(self) -> None:
        self._file.write('\n]}\n')
        self._file.close()

    def abort(self) -> None:
        # What it flushes is not wanted.
        with contextlib.suppress(OSError):
            self._file.close()

    def _heads(self, features: Features) -> list[str]:
        """All members of each but the geometry."""
        return [
            f'"properties": {{"class": {self._names[label]}, '
            f'"class_id": {label}, {self._area}: {area!r}}}'
            for label, area in zip(
                features.classes.tolist(), features.areas.tolist(), strict=True
            )
        ]


class QuPathFile(GeoJsonFile):
    """Annotations as QuPath opens them.

    Args:
        path: The file.
        layer: Name of the whole. The annotations' own come of it.
        class_names: Names of the classes.
        palette: One (red, green, blue) per class.
        metadata: As of :class:`GeoJsonFile`.
    """

    def __init__(
        self,
        path: Path,
        layer: str,
        class_names: Sequence[str],
        palette: Sequence[tuple[int, int, int]],
        metadata: Mapping[str, str],
    ) -> None:
        super().__init__(path, layer, class_names, 'area', None, metadata)
        self._seed = layer
        self._properties = [
            _json(
                {
                    'objectType': 'annotation',
                    'classification': {'name': name, 'color': list(rgb)},
                }
            )
            for name, rgb in zip(class_names, palette, strict=True)
        ]

    def _heads(self, features: Features) -> list[str]:
        return [
            f'"id": "{uuid.uuid5(_NAMESPACE, f"{self._seed}/{key}")}", '
            f'"properties": {self._properties[label]}'
            for label, key in zip(
                features.classes.tolist(), features.keys.tolist(), strict=True
            )
        ]


class GeoPackageFile(VectorFile):
    """One layer of polygons, with a spatial index.

    Args:
        path: The file, which ends in ``.gpkg``.
        layer: Name of the layer.
        class_names: Names of the classes.
        area: Name of the field that has the area.
        crs: Coordinate reference system as WKT, or None.
        metadata: Of the file.
    """

    def __init__(
        self,
        path: Path,
        layer: str,
        class_names: Sequence[str],
        area: str,
        crs: str | None,
        metadata: Mapping[str, str],
    ) -> None:
        self._path, self._layer, self._crs = path, layer, crs
        self._fields = ['class', 'class_id', area]
        self._names = np.array(class_names, object)
        none = np.empty(0, object)
        self._waiting: list[Features] = []
        self._write(
            Features(
                none, *(np.empty(0, kind) for kind in (int, float, float))
            ),
            dataset_metadata=dict(metadata) or None,
        )

    def append(self, features: Features) -> None:
        self._waiting.append(features)
        if sum(len(part.shapes) for part in self._waiting) >= _APPENDED:
            self._flush()

    def close(self) -> None:
        self._flush()

    def abort(self) -> None:
        self._waiting = []

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._write(
                Features(
                    *(np.concatenate(a) for a in zip(*waiting, strict=True))
                ),
                append=True,
            )

    def _write(self, features: Features, **settings: Any) -> None:
        import pyogrio
        import shapely

        with warnings.catch_warnings():
            # A picture without coordinates is no mistake.
            warnings.filterwarnings('ignore', "'crs' was not provided")
            pyogrio.raw.write(
                self._path,
                shapely.to_wkb(features.shapes),
                [
                    self._names[features.classes],
                    features.classes.astype(np.int32),
                    features.areas,
                ],
                self._fields,
                layer=self._layer,
                driver='GPKG',
                geometry_type='Polygon',
                crs=self._crs,
                **settings,
            )


def _crs_name(wkt: str) -> str:
    """The name that a coordinate reference system has by its code."""
    from rasterio.crs import CRS

    # Less would also take one for another of nearly the same numbers.
    code = CRS.from_wkt(wkt).to_authority(confidence_threshold=90)
    if code is None:
        raise ValueError(
            'GeoJSON cannot name a coordinate reference system without a '
            'code; use .gpkg'
        )
    # Longitude comes first, as in all that is written here.
    if code == ('EPSG', '4326'):
        return 'urn:ogc:def:crs:OGC:1.3:CRS84'
    return f'urn:ogc:def:crs:{code[0]}::{code[1]}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
